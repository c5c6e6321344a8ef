"""The experience log: one Redis stream, in one order, each fragment applied once. Workers push, the trainer reads in
order and trims what a durable checkpoint covers."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple, cast

import redis

from stagecoach.shared.base.errors import Fenced, FragmentError, ShardFull
from stagecoach.shared.experience import tensor_blob
from stagecoach.shared.experience.log_entry import STRANGERS, BodyPlace, LogEntry, whole_number
from stagecoach.shared.protocol.flow_control import KeyDamaged
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.payload_shards import Bodies
from stagecoach.shared.protocol.scripts import Call, Script, block_milliseconds, read_stream, stream_page, write_small

_LAST_POSSIBLE = f"{2**64 - 1}-{2**64 - 1}".encode()
_PAGE = 32


class PushReply(StrEnum):
    PUSHED = "pushed"
    DUPLICATE = "duplicate"
    STALE = "stale"
    """Dropped: its claim was given back (lease over, or released) and the window is full."""
    SUPERSEDED = "superseded"
    """A newer incarnation of the worker has registered."""
    EPOCH = "epoch"
    """Redis was rolled back: register again."""
    FINISHED = "finished"


@dataclass(frozen=True)
class Left:
    """State left by earlier incarnations of a worker."""

    action_trace: list[bytes]
    tries: int
    """Number of incarnations that died since the last push, resuming from there."""
    pushed: bool


class Settled(NamedTuple):
    """Sessions and turns of a gateway's clients that are settled with a push, or alone."""

    sessions: Mapping[str, int]
    """Session → its first message that is in no fragment so far."""
    late: int
    """Turns since the last time that came too late for any fragment."""

    @property
    def numbers(self) -> str:
        """The sessions as the scripts take them."""
        return ",".join(f"{name}={number}" for name, number in self.sessions.items())


class ExperienceLog:
    def __init__(self, client: redis.Redis, run_id: str, bodies: Bodies | None = None) -> None:
        self._redis, self._keys = client, RunKeys(run_id)
        self._bodies = bodies or Bodies({}, run_id)
        self._push = Script(client, self._keys, "push")
        self._trim = Script(client, self._keys, "trim")
        self._settle = Script(client, self._keys, "settle")
        self._quarantined: frozenset[bytes] | None = None

    def push(
        self, worker: str, incarnation: int, seq: int, epoch: int, transitions: int, fragment: bytes,
        action_trace: bytes = b"", action_trace_length: int = 0, then: Call[Any] | None = None, refusals: int = 0,
        *, memory: str = "", clients: Settled | None = None,
    ) -> PushReply:  # fmt: skip
        """Appends one fragment and honors its claim, in one step; safe to repeat. A body outside the log comes first.

        Args:
            action_trace: appended to the worker's in the same step, which keeps `action_trace_length` entries.
            then: runs after it in the same round trip, whatever the reply.
            refusals: STALE replies to this incarnation; separates a new fragment of the same number from a repeat.
            memory: token of the shared memory that the trainer reads, as the claim states it.
            clients: of a gateway: what is settled for its clients in the same step.

        Raises `ShardUnavailable` or `ShardFull`; then nothing has been appended.
        """
        place = self._bodies.share(worker, incarnation, seq, fragment, memory)
        if place is None and self._bodies.names:
            place = self._put(worker, incarnation, seq, fragment)
        field, value = ("fragment", fragment) if place is None else ("body", place.encode())
        arguments = self._push.arguments(
            worker=worker, incarnation=incarnation, seq=seq, epoch=epoch, transitions=transitions, field=field,
            value=value, bytes=len(fragment), refusals=refusals, action_trace=self._keys.action_trace(worker),
            action_trace_entry=action_trace, action_trace_length=action_trace_length,
            sessions=clients.numbers if clients else "",
            late=clients.late if clients else 0,
        )  # fmt: skip
        pushing = Call(self._push, arguments, lambda reply: PushReply(reply.decode()))
        reply = pushing.run(then)
        if place is not None and reply not in (PushReply.PUSHED, PushReply.DUPLICATE):
            self._bodies.remove(worker, place)
        return reply

    def _put(self, worker: str, incarnation: int, seq: int, body: bytes) -> BodyPlace:
        try:
            return self._bodies.put(worker, incarnation, seq, body)
        except ShardFull:  # the trainer writes a checkpoint, as for a claim that Redis has no memory for
            write_small(self._redis, self._keys, self._keys.flow, "HSET", "memory_full", 1)
            raise

    def settle(self, worker: str, incarnation: int, clients: Settled) -> None:
        """Settles late turns of a gateway's clients that no fragment follows; safe to repeat."""
        self._settle(worker=worker, incarnation=incarnation, sessions=clients.numbers, late=clients.late)

    def left(self, worker: str) -> Left:
        """Returns the state left by earlier incarnations of `worker`."""
        trace = cast(list[bytes], self._redis.lrange(self._keys.action_trace(worker), 0, -1))
        tries = cast(bytes | None, self._redis.hget(self._keys.pushed, f"{worker}:tries")) or b""
        pushed = self._redis.hexists(self._keys.produced, f"{worker}:fragments")
        return Left(trace, whole_number(tries), bool(pushed))

    def trying(self, worker: str, count: int) -> None:
        """Counts the start (1) or the end (-1) of a step that may kill `worker`; a push resets the count."""
        write_small(self._redis, self._keys, self._keys.pushed, "HINCRBY", f"{worker}:tries", count)

    def forget_action_trace(self, worker: str) -> None:
        """Deletes the action trace, so that no process resumes the episodes of `worker`."""
        self._redis.delete(self._keys.action_trace(worker))
        self._redis.hdel(self._keys.pushed, f"{worker}:tries")

    def open_session(self, session: str, worker: int) -> tuple[int | None, int]:
        """Returns the first message of a gateway's session that is in no fragment so far (None for a new session), and
        the worker that has the session for good: `worker` unless it has another one."""
        name, number = f"session:{session}", None
        pushed = self._keys.pushed
        if (found := cast(bytes | None, self._redis.hget(pushed, name))) is not None:
            number = whole_number(found)
        if (owner := cast(bytes | None, self._redis.hget(pushed, f"{name}:worker"))) is not None:
            return number, whole_number(owner)
        write_small(self._redis, self._keys, pushed, "HSET", f"{name}:worker", worker)
        return number, worker

    def objects_in_episodes(self) -> set[str]:
        """Returns the SHA-256 of the shared objects in episodes that a worker's successor would resume."""
        found = set[str]()
        workers = sorted(cast(dict[bytes, bytes], self._redis.hgetall(self._keys.incarnations)))
        for first in range(0, len(workers), _PAGE):
            pipeline = self._redis.pipeline(transaction=False)
            for worker in workers[first : first + _PAGE]:
                pipeline.lindex(self._keys.action_trace(worker.decode(errors="replace")), -1)
            for entry in pipeline.execute():
                with suppress(FragmentError, AttributeError, KeyError, TypeError):  # such a trace is not resumed
                    found |= {*tensor_blob.decode(entry or b"")[1]["objects"]}
        return found

    def read(self, after: str, count: int, block_seconds: float) -> list[LogEntry]:
        """Returns up to `count` entries after a position; waits at most `block_seconds`. Raises `ShardUnavailable`."""
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.xread({self._keys.log: after}, count=count, block=block_milliseconds(block_seconds))
        pipeline.xrange(self._keys.pushes, f"({after}", count=count)
        try:
            found, pushes = pipeline.execute()
        except redis.ResponseError:  # alone, the read names a damaged key
            return self._with_bodies(self._parsed(read_stream(self._redis, self._keys.log, after, count, 0.0)))
        page, ours = stream_page(found), {id_ for id_, _ in pushes}
        known = all(id_ in ours for id_, _ in page)  # else entries are foreign, or some were removed by hand
        return self._with_bodies(self._parsed(page, ours if known else None))

    def _parsed(
        self, page: Sequence[tuple[bytes, dict[bytes, bytes]]], ours: Collection[bytes] | None = None
    ) -> list[LogEntry]:
        """Returns the entries; those without a push are foreign. Quarantine is decided before a trainer reads.

        `ours` are the positions that have a push, if they are known.
        """
        if not page:
            return []
        if page[-1][0] == _LAST_POSSIBLE:
            raise KeyDamaged(self._keys.log, f"an entry stands at {_LAST_POSSIBLE.decode()}, and none can follow it")
        if self._quarantined is None:
            decided = cast(dict[bytes, bytes], self._redis.hgetall(self._keys.quarantine))
            self._quarantined = frozenset(id_ for id_, why in decided.items() if why != b"dropped")
        outside = [id_ for id_, fields in page if b"body" in fields and id_ not in self._quarantined]
        gone = set[bytes]()
        if ours is None:
            ours = {id_ for id_, _ in cast(Any, self._redis.xrange(self._keys.pushes, page[0][0], page[-1][0]))}
        if outside:
            lost = cast(Any, self._redis.smismember(self._keys.lost_bodies, outside))
            gone = {id_ for id_, is_lost in zip(outside, lost, strict=True) if is_lost}
        return [
            _entry(id_, fields, pushed=id_ in ours, quarantined=id_ in self._quarantined, lost_body=id_ in gone)
            for id_, fields in page
        ]

    def _with_bodies(self, page: list[LogEntry]) -> list[LogEntry]:
        """Returns the entries with their bodies from elsewhere, except of those that were given up."""
        outside = [entry for entry in page if not entry.quarantined and not entry.lost_body]
        wanted = {entry.id: (entry.worker, entry.place) for entry in outside if entry.place is not None}
        bodies = dict(zip(wanted, self._bodies.fetch(list(wanted.values())), strict=True))
        return [replace(entry, fragment=bodies[entry.id]) if entry.id in bodies else entry for entry in page]

    def give_up(self, positions: Sequence[str]) -> None:
        """Counts the bodies of the entries there as lost; for a Redis that has forgotten it."""
        if positions:
            write_small(self._redis, self._keys, self._keys.lost_bodies, "SADD", *positions)

    def between(self, after: str, through: str) -> Iterator[LogEntry]:
        """The entries after one position, through another, a page at a time; raises `ShardUnavailable`."""
        while True:
            page = cast(Any, self._redis.xrange(self._keys.log, f"({after}", through, count=_PAGE))
            if not page:
                return
            first, last = page[0][0], page[-1][0]
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.xrange(self._keys.pushes, first, last)
            pipeline.xrange(self._keys.log, first, first)
            pushes, still = pipeline.execute()
            if not still:  # trimmed meanwhile, and so were its pushes
                continue
            yield from self._with_bodies(self._parsed(page, {id_ for id_, _ in pushes}))
            if len(page) < _PAGE:
                return
            after = last.decode()

    def trim(self, epoch: int, through: str, process: str = "") -> int:
        """Removes all entries through a position, and the bodies that the log names no more; raises `Fenced`. Only
        in the Redis `process`, '' for any."""
        removed = int(self._trim(epoch=epoch, through=through, process=process))
        if removed < 0:
            raise Fenced(f"epoch {epoch} may not trim the log; a newer trainer has taken over")
        if self._bodies:
            self._bodies.sweep(self._redis)
        return removed

    def ends_at(self, position: str) -> bool:
        """Checks that the log has no entry after a position."""
        return not self._redis.xrange(self._keys.log, f"({position}", count=1)

    def __len__(self) -> int:
        return self._redis.xlen(self._keys.log)


def _entry(
    id_: bytes, fields: dict[bytes, bytes], *, pushed: bool, quarantined: bool, lost_body: bool
) -> LogEntry:  # fmt: skip
    """Returns the entry; one of another program is counted as a stranger's."""
    if not pushed:
        return LogEntry(id_.decode(), STRANGERS, 0, 0, 0, b"", False)
    place = BodyPlace.decode(fields[b"body"]) if b"body" in fields else None
    worker, body = fields.get(b"worker", b"").decode(errors="replace"), None if place else fields.get(b"fragment", b"")
    names = (b"incarnation", b"seq", b"transitions", b"lost")
    incarnation, seq, transitions, lost = (whole_number(fields.get(name, b"")) for name in names)
    return LogEntry(
        id_.decode(), worker, incarnation, seq, transitions, body, True, lost,
        pushed_at=whole_number(fields[b"version"]) if b"version" in fields else None, place=place,
        quarantined=quarantined, lost_body=lost_body,
    )  # fmt: skip
