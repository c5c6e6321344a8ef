"""The log consumer: log entries, in order, become fragments to learn from, or are dropped and counted with a reason.

Every entry ends in the ledger. A dropped one gives its credit back, so that a bad fragment never stops the run.
"""

import hashlib
import logging
from collections import Counter, deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from enum import StrEnum

import redis

from stagecoach.shared.base.errors import BodyLost, DropReason, Fenced, FragmentError, RedisRolledBack, StagecoachError
from stagecoach.shared.base.printable import counted
from stagecoach.shared.base.stage_timer import StageTimer
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience import fragment
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.experience.fragment import Fragment
from stagecoach.shared.experience.log_entry import START, LogEntry, before, id_order
from stagecoach.shared.experience.spaces import EnvironmentDescription
from stagecoach.shared.protocol.events import emit
from stagecoach.shared.protocol.ledger import Ledger, Taken, digest_of
from stagecoach.shared.protocol.quarantine import WorkRecord
from stagecoach.shared.protocol.scripts import Script

_LOGGER = logging.getLogger("stagecoach.trainer")
_BAD_IN_A_ROW = 200
_NO_FAULT = {
    DropReason.STALE, DropReason.DUPLICATE, DropReason.LOST_BODY, DropReason.POISON, DropReason.FOREIGN,
}  # fmt: skip
"""Reasons that say nothing against the environment or the worker's code."""
ObserveDrop = Callable[[LogEntry, DropReason, int, str], None]
"""Called with an entry, why it was dropped (or, for LOST, fragments before it), the fragments, and the details."""


@dataclass(frozen=True)
class Committed:
    """Offset and accounting at the last published version, as a checkpoint records them."""

    position: str
    ledger: str
    lags: dict[int, int]
    histories: dict[int, str] = field(default_factory=dict)
    """Histories of the versions that may still have acted."""
    marks: tuple[tuple[str, str], ...] = ()
    """Positions of versions since the log was trimmed, each with the digest of all entries taken through it."""


class DropReply(StrEnum):
    DROPPED = "dropped"
    KNOWN = "known"
    """Committed before."""
    LATE = "late"
    """Committed before, and its credit is given back now."""
    MISSED = "missed"
    """Committed while its body, which is lost now, was there."""
    FENCED = "fenced"
    BEHIND = "behind"


class RedisAccounting(WorkRecord):
    """Record of the drops of one trainer (one epoch), and of the entries that it takes."""

    def __init__(self, client: redis.Redis, run_id: str, epoch: int) -> None:
        super().__init__(client, run_id, epoch)
        self._drop = Script(client, self._keys, "drop")
        self.redis_process = ""
        """The Redis process that the trainer's accounting was last matched with; '' for any."""
        self.given_up: list[str] = []
        """Positions of lost bodies, which a Redis that comes back with less may have forgotten."""

    def commit_drop(self, position: str, claims: int, ledger: Ledger, decided: DropReason | None = None) -> bool:
        """Commits all up to `position` to `ledger` and gives `claims` back; returns whether this is the first time. For
        the reason `decided` (LOST_BODY, POISON) the entry there is dropped from now on, whatever it holds. Raises
        `Fenced`, `RedisRolledBack`, and `BodyLost` where the entry was committed while its body was there."""
        found = self._drop(
            epoch=self._epoch, committed_id=position, claims=claims, process=self.redis_process,
            decided=decided or "", accounts=ledger.news(),
        )  # fmt: skip
        reply = DropReply(found.decode())
        if reply is DropReply.FENCED:
            raise Fenced(f"epoch {self._epoch} may not commit drops; a newer trainer has taken over")
        if reply is DropReply.BEHIND:
            raise RedisRolledBack(f"{position} is not committed: Redis came back, perhaps without what came last")
        if reply is DropReply.MISSED:
            raise BodyLost(f"the body of log entry {position}, which was learned from already, is on no shard any more")
        if reply is DropReply.DROPPED:
            ledger.told()
        if decided is DropReason.LOST_BODY:
            self.given_up.append(position)
        return reply is not DropReply.KNOWN

    def emit_event(self, text: str) -> None:
        emit(self._client, self._run_id, "dropped", text)


class LogConsumer:
    """Reads one run's log from a position on; the same entries at the same versions are judged the same."""

    def __init__(
        self, run_id: str, config: Config, description: EnvironmentDescription,
        read: Callable[[str, int, float], list[LogEntry]], accounting: RedisAccounting | None,
        stages: StageTimer | None = None, *, observe_drop: ObserveDrop | None = None,
    ) -> None:  # fmt: skip
        """`read` is that of the log or its archive; without `accounting` (a replay) nothing is recorded. `observe_drop`
        is called for each drop instead of a line in the process's log."""
        self._stages, self._observe_drop = stages or StageTimer(), observe_drop or _log_drop
        self._run_id, self._description = run_id, description
        self._rollout, self._shape = config.rollout, (config.fragment_rows, config.environment.num_envs)
        self._by_log_prob = {name for name in config.trainable if not config.algorithm_of(name).learns_from_others}
        """The policies that learn only from what they acted themselves. Without any, what was acted at random and comes
        when warm-up is over is learned from like anything else."""
        self._state_sizes = config.state_sizes
        shape = config.rollout.fragment_steps, config.environment.num_envs
        self._most_bytes = fragment.expected_bytes(description, *shape, self._state_sizes)
        self._read, self._accounting = read, accounting
        self._buffer: deque[LogEntry] = deque()
        self.batch: list[Fragment] = []
        """The fragments of the next update, as far as they are there."""
        self._told: set[tuple[str, DropReason]] = set()
        self._in_a_row = 0
        self.position = START
        self.ledger = Ledger()
        self.lags: Counter[int] = Counter()
        self._history = ""
        """Digest of the consumed fragments in order: equal digests give equal weights."""
        self._histories: dict[int, str] = {}
        self._digest = ""
        """Digest of the names of all entries taken, also of those that were dropped."""
        self._marks = {START: ""}
        """`Committed.marks`."""
        self._trimmed = START
        self.commit()

    def restore(self, committed: Committed) -> None:
        self._buffer.clear()
        self.batch.clear()
        self.position, self.lags = committed.position, Counter(committed.lags)
        self.ledger = Ledger.from_json(committed.ledger)
        self._histories = dict(committed.histories)
        self._history = self._histories[max(self._histories)] if self._histories else ""
        self._marks = dict(committed.marks)
        self._digest = self._marks.setdefault(self.position, "")
        self.trimmed(self._trimmed)
        self.commit()

    def commit(self, version: int | None = None) -> None:
        """All that was taken so far is behind a published version."""
        if version is not None:
            self._histories[version] = self._history
            oldest = version - self._rollout.max_policy_lag
            self._histories = {known: name for known, name in self._histories.items() if known >= oldest}
            if self._accounting is not None:
                self._marks[self.position] = self._digest
        marks = tuple(self._marks.items())
        self.committed = Committed(self.position, self.ledger.as_json(), dict(self.lags), dict(self._histories), marks)

    def history(self, version: int) -> str:
        return self._histories.get(version, "")

    def taken(self) -> Taken:
        """The entries through the last published version that were taken since the log was trimmed last."""
        marks = list(self._marks.items())
        (after, before), (_, digest) = marks[0], marks[-1]
        return Taken(after, before, digest)

    def trimmed(self, through: str) -> None:
        """The log needs no entry up to there any more: a durable checkpoint covers it."""
        self._trimmed = max(self._trimmed, through, key=id_order)
        reached = id_order(through)
        while len(self._marks) > 1 and id_order(first := next(iter(self._marks))) < reached:
            del self._marks[first]

    def take(self, version: int, phase: Phase, block_seconds: float) -> Fragment | None:
        """The next fragment to learn from at policy `version`; None where the log has no more for now."""
        while True:
            if not self._buffer:
                count = self._rollout.fragments_per_update
                with nullcontext() if block_seconds else self._stages.during("read"):  # else it is a wait
                    self._buffer.extend(self._read(self.position, count, block_seconds))
                if not self._buffer:
                    return None
            entry = self._buffer.popleft()
            self.position = entry.id
            with self._stages.during("decode"):
                taken = self._judge(entry, version, phase)
            if taken is not None:
                return taken

    def _judge(self, entry: LogEntry, version: int, phase: Phase) -> Fragment | None:
        self._digest = digest_of(self._digest, _name(entry))
        last = self.ledger.of(entry.worker).high_water.get(entry.incarnation, -1)
        if entry.pushed and entry.seq <= last:
            self._dropped(entry, DropReason.DUPLICATE, f"sequence number {entry.seq} after {last}")
            return None
        if entry.pushed:
            self._count_lost(entry, entry.seq - last - 1)
            self.ledger.of(entry.worker).saw(entry.incarnation, entry.seq)
        if self._accounting is not None:
            self._accounting.taking(entry.id, entry.id)
        try:
            if not entry.pushed:
                raise FragmentError(DropReason.FOREIGN, "no worker pushed it; it was added to the log manually")
            if entry.quarantined:
                raise FragmentError(DropReason.POISON, "trainers died over it, or `resume --drop` named it")
            if entry.fragment is None:
                shard = entry.place.shard if entry.place else "its shard"
                raise FragmentError(DropReason.LOST_BODY, f"{shard} has it no more")
            parsed = self._decoded(entry.id, entry.fragment)
            by_log_prob = self._by_log_prob if phase is Phase.TRAIN else ()
            fragment.check(parsed, self._run_id, self._description, self._state_sizes, by_log_prob=by_log_prob)
            self._check(entry, parsed, version, phase)
        except FragmentError as error:
            self._dropped(entry, error.reason, error.detail)
            return None
        self._in_a_row = 0
        self._history = hashlib.blake2b(f"{self._history} {_name(entry)}".encode(), digest_size=8).hexdigest()
        self.ledger.consume(entry.worker, entry.transitions)
        self.lags[version - parsed.header.version] += 1
        return replace(parsed, position=entry.id, pushed_at=entry.pushed_at)

    def _decoded(self, position: str, blob: bytes) -> Fragment:
        """Decodes the body of the entry there; reads it again where it is damaged, which may have come on the way."""
        try:
            return fragment.decode(blob, self._most_bytes)
        except FragmentError as error:
            if error.reason not in (DropReason.UNDECODABLE, DropReason.CORRUPT):
                raise
            again = self._read(before(position), 1, 0.0)
            if not again or again[0].id != position or again[0].fragment in (None, blob):
                raise
            return fragment.decode(again[0].fragment or b"", self._most_bytes)

    def _check(self, entry: LogEntry, parsed: Fragment, version: int, phase: Phase) -> None:
        header, lag, reason = parsed.header, version - parsed.header.version, DropReason.SCHEMA
        if (header.worker_id, header.incarnation, header.seq) != (entry.worker, entry.incarnation, entry.seq):
            found = f"the entry is {entry.worker}:{entry.incarnation}:{entry.seq}, its header differs"
        elif (header.steps, header.num_envs) != self._shape:
            found = f"{header.steps} steps × {header.num_envs} environments is not this run's shape"
        elif lag < 0:
            reason = DropReason.STALE
            found = f"acted by version {header.version}, which does not exist: Redis lost it, and the trainer ended"
        elif lag <= self._rollout.max_policy_lag and header.history != self.history(header.version):
            reason = DropReason.STALE
            found = f"acted by another version {header.version}, which Redis lost before its trainer ended"
        elif lag > self._rollout.max_policy_lag:
            reason, found = DropReason.STALE, f"lag {lag} is more than {self._rollout.max_policy_lag}"
        elif header.phase is not phase and self._by_log_prob:
            reason, found = DropReason.STALE, f"acted in {header.phase}, the trainer is in {phase}"
        else:
            return
        raise FragmentError(reason, found)

    def _count_lost(self, entry: LogEntry, gap: int) -> None:
        if gap > 0:
            detail = f"{counted(gap, 'fragment')} before number {entry.seq} never reached the log, or were lost there"
            self._observe_drop(entry, DropReason.LOST, gap, detail)
            self.ledger.drop(entry.worker, DropReason.LOST, gap * entry.transitions, gap)
            self.ledger.of(entry.worker).saw(entry.incarnation, entry.seq - 1)  # committed with it, so counted once
            if self._accounting is not None:  # Redis lost the others' credit with them
                self._accounting.commit_drop(before(entry.id), max(0, gap - entry.lost), self.ledger)

    def _dropped(self, entry: LogEntry, reason: DropReason, detail: str) -> None:
        """Counted; an event for the first of its kind; the end of the run where nothing but bad fragments comes."""
        self._observe_drop(entry, reason, 1, detail)
        self.ledger.drop(entry.worker, reason, entry.transitions)
        decided = reason if reason in (DropReason.LOST_BODY, DropReason.POISON) else None
        accounting = self._accounting
        if accounting is None or not accounting.commit_drop(entry.id, int(entry.pushed), self.ledger, decided):
            return
        self._in_a_row += reason not in _NO_FAULT
        if (entry.worker, reason) not in self._told:
            self._told.add((entry.worker, reason))
            accounting.emit_event(f"a fragment of {entry.worker} is {reason}: {detail}")
        if self._in_a_row >= _BAD_IN_A_ROW:
            raise StagecoachError(
                f"{self._in_a_row} fragments in a row were dropped, the last as {reason}: {detail}; look at the env"
            )


def _log_drop(entry: LogEntry, reason: DropReason, fragments: int, detail: str) -> None:
    level = logging.ERROR if reason is DropReason.LOST else logging.WARNING
    whose = f"{counted(fragments, 'fragment')} of {entry.worker}:{entry.incarnation}"
    _LOGGER.log(level, "log entry %s: %s dropped as %s: %s", entry.id, whose, reason, detail)


def _name(entry: LogEntry) -> str:
    """Returns the name by which scripts compare the log with the entries taken."""
    return f"{entry.id} {entry.worker}:{entry.incarnation}:{entry.seq}" if entry.pushed else entry.id
