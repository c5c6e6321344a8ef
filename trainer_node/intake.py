"""Intake: log entries, in order, become fragments to learn from, or are dropped and counted with their reason.

Every entry ends in the ledger. What is dropped gives its credit back, so that a bad fragment never stops the run.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

from shared import fragment, scripts
from shared.config import Config
from shared.errors import BodyLost, Fenced, FragmentError, RedisSetBack, StagecoachError
from shared.events import emit
from shared.experience_log import START, LogEntry, LogReader
from shared.experience_log import before as preceding
from shared.fragment import Fragment
from shared.ledger import Ledger
from shared.quarantine import WorkRecord
from shared.redis_keys import RunKeys
from shared.role import Role
from shared.script_calls import Step
from shared.spaces import EnvironmentDescription
from shared.stages import Stages
from shared.steps import Phase

_LOGGER = logging.getLogger("stagecoach.trainer")
_BAD_IN_A_ROW = 200


@dataclass(frozen=True)
class Committed:
    """The books at the last published version: what a checkpoint records."""

    position: str
    ledger: str
    lags: dict[int, int]


class Settlement(Protocol):
    """Where it is recorded that a fragment was dropped: in Redis by a trainer, nowhere by a replay."""

    def settle(self, position: str, claims: int, ledger: Ledger, decided: str = "") -> bool:
        """All up to `position` is in `ledger`, and `claims` are given back; whether this is the first time.

        `decided` (`lost_body`, `poison`): for this reason the entry there is dropped from now on, whatever it holds.
        """
        ...

    def taking(self, first: str = "", last: str = "") -> None:
        """The entries that are decoded or learnt from next."""
        ...

    def tell(self, text: str) -> None:
        """For people."""
        ...


class RedisSettlement:
    """The settlement of one trainer (one epoch)."""

    def __init__(self, role: Role, epoch: int) -> None:
        self._redis, self._run_id, self._keys = role.redis, role.run_id, RunKeys(role.run_id)
        self._drop = Step(role.redis, scripts.DROP)
        self._epoch = epoch
        self.work = WorkRecord(role, epoch)
        self.process = ""
        """The Redis process that the trainer's books were matched with last; '' for any."""
        self.given_up: list[str] = []
        """Positions of lost bodies, which a Redis that comes back with less may have forgotten."""

    def taking(self, first: str = "", last: str = "") -> None:
        """As `WorkRecord.taking`."""
        self.work.taking(first, last)

    def settle(self, position: str, claims: int, ledger: Ledger, decided: str = "") -> bool:
        """Once for each position, however often it is read.

        Raises `Fenced` for an older trainer, `RedisSetBack` where Redis may have lost what the ledger says, and
        `BodyLost` where the entry was settled while its body was there.
        """
        keys = [
            self._keys.flow, self._keys.ledger, self._keys.wakeups, self._keys.lost_bodies, self._keys.quarantine
        ]  # fmt: skip
        word = self._drop(keys, [self._epoch, position, claims, self.process, decided, *ledger.news()])
        if word == b"fenced":
            raise Fenced(f"epoch {self._epoch} may not settle fragments; a newer trainer has taken over")
        if word == b"behind":
            raise RedisSetBack(f"{position} is not settled: Redis came back, perhaps without what came last")
        if word == b"missed":
            raise BodyLost(f"the body of log entry {position}, which was learnt from already, is on no shard any more")
        if word == b"dropped":
            ledger.told()
        if decided == "lost_body":
            self.given_up.append(position)
        return word in (b"dropped", b"late")

    def tell(self, text: str) -> None:
        """As an event."""
        emit(self._redis, self._run_id, "dropped", text)


class Intake:
    """Reads one run's log from a position on; the same entries at the same versions are judged the same."""

    def __init__(
        self,
        run_id: str,
        config: Config,
        description: EnvironmentDescription,
        log: LogReader,
        settlement: Settlement,
        stages: Stages | None = None,
    ) -> None:
        self._stages = stages or Stages()
        self._run_id = run_id
        self._description = description
        self._rollout = config.rollout
        self._num_envs = config.environment.num_envs
        self._learns_from_others = config.algorithm.resolved().learns_from_others
        """Then what was acted at random and comes when heat-up is over is learnt from like anything else."""
        self._state_sizes = config.state_sizes
        self._own_policy_only = not config.algorithm.learns_from_others
        self._log = log
        self._settlement = settlement
        self._buffer: deque[LogEntry] = deque()
        self._told: set[tuple[str, str]] = set()
        self._in_a_row = 0
        self.position = START
        self.ledger = Ledger()
        self.lags: Counter[int] = Counter()
        self.commit()

    def restore(self, books: Committed) -> None:
        """Goes on from there."""
        self._buffer.clear()
        self.position, self.ledger, self.lags = books.position, Ledger.from_json(books.ledger), Counter(books.lags)
        self.commit()

    def commit(self) -> None:
        """All that was taken so far is behind a published version."""
        self.committed = Committed(self.position, self.ledger.as_json(), dict(self.lags))

    def take(self, version: int, phase: Phase, block_seconds: float) -> Fragment | None:
        """The next fragment to learn from at policy `version`; None where the log has no more for now."""
        while True:
            if not self._buffer:
                count = self._rollout.fragments_per_update
                with nullcontext() if block_seconds else self._stages.during("read"):  # else it is a wait
                    self._buffer.extend(self._log.read(self.position, count, block_seconds))
                if not self._buffer:
                    return None
            entry = self._buffer.popleft()
            self.position = entry.id
            with self._stages.during("decode"):
                taken = self._judge(entry, version, phase)
            if taken is not None:
                return taken

    def _judge(self, entry: LogEntry, version: int, phase: Phase) -> Fragment | None:
        account = self.ledger.of(entry.worker)
        last = account.high_water.get(entry.incarnation, -1)
        if entry.claimed and entry.seq <= last:
            self._dropped(entry, "duplicate", f"sequence number {entry.seq} after {last}")
            return None
        if entry.claimed:
            self._count_lost(entry, entry.seq - last - 1)
            self.ledger.of(entry.worker).saw(entry.incarnation, entry.seq)
        self._settlement.taking(entry.id, entry.id)
        try:
            if not entry.claimed:
                raise FragmentError("foreign", "no worker pushed it; it was put into the log by hand")
            if entry.quarantined:
                raise FragmentError("poison", "trainers died over it, or `resume --drop` named it")
            if entry.fragment is None:
                raise FragmentError("lost_body", f"{entry.place.shard if entry.place else 'its shard'} has it no more")
            parsed = fragment.decode(entry.fragment)
            by_log_prob = self._own_policy_only and phase is Phase.TRAIN
            fragment.check(parsed, self._run_id, self._description, self._state_sizes, by_log_prob=by_log_prob)
            self._check_source(entry, parsed)
            self._check_lag(parsed, version, phase)
        except FragmentError as error:
            self._dropped(entry, error.reason, error.detail)
            return None
        self._in_a_row = 0
        self.ledger.consume(entry.worker, entry.transitions)
        self.lags[version - parsed.header.version] += 1
        return replace(parsed, position=entry.id)

    def _check_source(self, entry: LogEntry, parsed: Fragment) -> None:
        header = parsed.header
        if (header.worker_id, header.incarnation, header.seq) != (entry.worker, entry.incarnation, entry.seq):
            raise FragmentError(
                "schema", f"the entry is {entry.worker}:{entry.incarnation}:{entry.seq}, its header differs"
            )
        if (header.steps, header.num_envs) != (self._rollout.fragment_steps, self._num_envs):
            raise FragmentError(
                "schema", f"{header.steps} steps × {header.num_envs} environments is not this run's shape"
            )

    def _check_lag(self, parsed: Fragment, version: int, phase: Phase) -> None:
        lag = version - parsed.header.version
        if lag < 0:
            raise FragmentError("schema", f"acted by version {parsed.header.version}, which does not exist yet")
        if lag > self._rollout.max_policy_lag:
            raise FragmentError("stale", f"lag {lag} is more than {self._rollout.max_policy_lag}")
        if parsed.header.phase is not phase and not self._learns_from_others:
            raise FragmentError("stale", f"acted in {parsed.header.phase}, the trainer is in {phase}")

    def _count_lost(self, entry: LogEntry, gap: int) -> None:
        if gap > 0:
            _LOGGER.error("%s:%d: %d fragments before %d are lost", entry.worker, entry.incarnation, gap, entry.seq)
            self.ledger.drop(entry.worker, "lost", gap * entry.transitions, gap)
            self.ledger.of(entry.worker).saw(entry.incarnation, entry.seq - 1)  # settled with it, so counted once
            self._give_back(entry, max(0, gap - entry.lost), before=True)  # Redis lost the others' credit with them

    def _dropped(self, entry: LogEntry, reason: str, detail: str) -> None:
        _LOGGER.warning("log entry %s (%s) dropped as %s: %s", entry.id, entry.worker, reason, detail)
        self.ledger.drop(entry.worker, reason, entry.transitions)
        if self._give_back(
            entry, 1 if entry.claimed else 0, decided=reason if reason in ("lost_body", "poison") else ""
        ):
            self._tell(entry, reason, detail)

    def _tell(self, entry: LogEntry, reason: str, detail: str) -> None:
        """An event for the first of its kind; the end of the run where nothing but bad fragments comes."""
        self._in_a_row += reason not in ("stale", "duplicate", "lost_body", "poison", "foreign")
        if (entry.worker, reason) not in self._told:
            self._told.add((entry.worker, reason))
            self._settlement.tell(f"a fragment of {entry.worker} is {reason}: {detail}")
        if self._in_a_row >= _BAD_IN_A_ROW:
            raise StagecoachError(
                f"{self._in_a_row} fragments in a row were dropped, the last as {reason}: {detail}; look at the env"
            )

    def _give_back(self, entry: LogEntry, claims: int, before: bool = False, decided: str = "") -> bool:
        """Settles up to this entry (or just before it); whether this was the first time."""
        return self._settlement.settle(preceding(entry.id) if before else entry.id, claims, self.ledger, decided)
