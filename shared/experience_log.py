"""The experience log: one Redis stream, in one order, each fragment applied once.

Workers push, the trainer reads in order and trims what a durable checkpoint covers. An entry holds its fragment's body,
or, where the run has shards, says where it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import redis

from shared import scripts
from shared.bodies import Bodies, BodyPlace
from shared.damaged_keys import KeyDamaged
from shared.errors import Fenced, ShardFull
from shared.redis_keys import RunKeys
from shared.script_calls import Call, Step, run_both

START = "0-0"
"""The position before the first entry."""
STRANGERS = "strangers"
"""Stands in a worker's place for all that no worker pushed; whatever else it says is not read."""
_LAST_POSSIBLE = f"{2**64 - 1}-{2**64 - 1}".encode()
_MOST_DIGITS = 15
_PAGE = 32


@dataclass(frozen=True)
class LogEntry:
    """One entry as Redis holds it; `fragment` is not yet decoded."""

    id: str
    worker: str
    incarnation: int
    seq: int
    transitions: int
    fragment: bytes | None
    """None where no shard has its body (any more)."""
    claimed: bool
    """Whether the push script wrote it, so that a claim stands behind it; else its worker is `STRANGERS`."""
    lost: int = 0
    """Fragments before it that were missing when it was pushed: Redis had lost them, and the credit behind them."""
    place: BodyPlace | None = None
    """Where its body is to be, if not in the log itself."""
    lost_body: bool = False
    """Whether it was dropped for its lost body, which is then decided for good: `fragment` is None."""
    quarantined: bool = False
    """Whether it is to be dropped unread (shared/quarantine.py)."""


@dataclass(frozen=True)
class Left:
    """What a worker finds of its predecessors."""

    trail: list[bytes]
    """Oldest first."""
    tries: int
    """How many have died since the last push, while they acted on from there."""
    pushed: bool
    """Whether any of them has pushed anything."""


class LogReader(Protocol):
    """Whatever gives log entries in order: the log itself, or its archive."""

    def read(self, after: str, count: int, block_seconds: float) -> list[LogEntry]:
        """Up to `count` entries after position `after`."""
        ...


class ExperienceLog:
    """Push, read, trim."""

    def __init__(self, client: redis.Redis, run_id: str, bodies: Bodies | None = None) -> None:
        self._redis = client
        self._bodies = bodies or Bodies({}, run_id)
        self._keys = RunKeys(run_id)
        self._push = Step(client, scripts.PUSH)
        self._trim = Step(client, scripts.TRIM)
        self._quarantined: frozenset[bytes] | None = None

    def push(
        self,
        worker: str,
        incarnation: int,
        seq: int,
        epoch: int,
        transitions: int,
        fragment: bytes,
        trail: bytes = b"",
        trail_length: int = 0,
        then: Call[Any] | None = None,
        refusals: int = 0,
    ) -> str:
        """Appends one fragment and honours its claim, in one step; safe to repeat. Its body is on a shard before.

        In the same step `trail` becomes the last entry of the worker's trail, which keeps its last `trail_length` ones.
        Raises `ShardUnavailable` or `ShardFull`; then nothing has happened, and the trainer knows of a full one.

        Answers `pushed`, `duplicate` (it was there already), `stale` (its lease ran out and the place is taken; it is
        counted as dropped), `superseded` (a newer incarnation acts in its place), `epoch` (Redis was set back in time:
        register again) or `finished`. `refusals` is how often this incarnation has heard `stale`: it tells another
        fragment under the same number from one that is sent again. `then` is run right after it in the same round trip,
        whatever that answers.
        """
        keys = [
            self._keys.flow, self._keys.claims, self._keys.log, self._keys.pushed, self._keys.produced,
            self._keys.incarnations, self._keys.trail(worker), self._keys.pushes,
        ]  # fmt: skip
        field, value, place = "fragment", fragment, None
        if self._bodies:
            place = self._put(worker, incarnation, seq, fragment)
            field, value = "body", place.encode()
        arguments: list[Any] = [
            worker, incarnation, seq, epoch, transitions, value, trail, trail_length, field, len(fragment),
            refusals,
        ]  # fmt: skip
        pushing = Call(self._push, keys, arguments, bytes.decode)
        word = pushing.run() if then is None else run_both(self._redis, pushing, then)[0]
        if place is not None and word not in ("pushed", "duplicate"):
            self._bodies.remove(worker, place)
        return word

    def _put(self, worker: str, incarnation: int, seq: int, body: bytes) -> BodyPlace:
        try:
            return self._bodies.put(worker, incarnation, seq, body)
        except ShardFull:  # the trainer writes a checkpoint, as for a claim that Redis has no memory for
            scripts.write_small(self._redis, self._keys.flow, self._keys.flow, "HSET", "memory_full", 1)
            raise

    def left(self, worker: str) -> Left:
        """What the incarnations of `worker` before this one have left."""
        trail = cast(list[bytes], self._redis.lrange(self._keys.trail(worker), 0, -1))
        tries = cast(bytes | None, self._redis.hget(self._keys.pushed, f"{worker}:tries"))
        return Left(
            trail, whole_number(tries or b""), bool(self._redis.hexists(self._keys.produced, f"{worker}:fragments"))
        )

    def trying(self, worker: str, count: int) -> None:
        """`worker` begins (1) something that it may not outlive, or has outlived it (-1); a push counts as both."""
        scripts.write_small(self._redis, self._keys.flow, self._keys.pushed, "HINCRBY", f"{worker}:tries", count)

    def forget_trail(self, worker: str) -> None:
        """Nobody shall take up the episodes of `worker`."""
        self._redis.delete(self._keys.trail(worker))
        self._redis.hdel(self._keys.pushed, f"{worker}:tries")

    def read(self, after: str, count: int, block_seconds: float) -> list[LogEntry]:
        """Up to `count` entries after position `after`, waiting at most `block_seconds` for the first.

        Raises `ShardUnavailable` where their bodies cannot be asked for.
        """
        block = max(1, int(block_seconds * 1000)) if block_seconds > 0 else None
        answer = cast(Any, self._redis.xread({self._keys.log: after}, count=count, block=block))
        if not answer:
            return []
        entries = answer[0][1] if isinstance(answer, list) else next(iter(answer.values()))[0]
        return self._with_bodies(self._parsed(entries))

    def _parsed(self, page: Sequence[tuple[bytes, dict[bytes, bytes]]]) -> list[LogEntry]:
        """Of an entry that stands there, the push was written with it. What is in quarantine is decided before a
        trainer reads, and asked for once."""
        if not page:
            return []
        if page[-1][0] == _LAST_POSSIBLE:
            raise KeyDamaged(self._keys.log, f"an entry stands at {_LAST_POSSIBLE.decode()}, and none can follow it")
        if self._quarantined is None:
            decided = cast(dict[bytes, bytes], self._redis.hgetall(self._keys.quarantine))
            self._quarantined = frozenset(id_ for id_, why in decided.items() if why != b"dropped")
        pushes = cast(Any, self._redis.xrange(self._keys.pushes, page[0][0], page[-1][0]))
        ours = {id_ for id_, _ in pushes}
        return [_entry(id_, fields, id_ in ours, id_ in self._quarantined) for id_, fields in page]

    def _with_bodies(self, page: list[LogEntry]) -> list[LogEntry]:
        """The same entries, with what the shards have of them; not of those that were given up, whatever comes back."""
        elsewhere = [entry for entry in page if entry.place is not None and not entry.quarantined]
        if not elsewhere:
            return page
        lost = cast(Any, self._redis.smismember(self._keys.lost_bodies, [entry.id for entry in elsewhere]))
        wanted = [(e.worker, e.place) for e, gone in zip(elsewhere, lost, strict=True) if e.place and not gone]
        found = iter(self._bodies.fetch(wanted))
        whole = {
            entry.id: replace(entry, lost_body=bool(gone), fragment=None if gone else next(found))
            for entry, gone in zip(elsewhere, lost, strict=True)
        }
        return [whole.get(entry.id, entry) for entry in page]

    def give_up(self, positions: Sequence[str]) -> None:
        """The bodies of the entries there count as lost; for a Redis that has forgotten it."""
        if positions:
            scripts.write_small(self._redis, self._keys.flow, self._keys.lost_bodies, "SADD", *positions)

    def between(self, after: str, through: str) -> Iterator[LogEntry]:
        """The entries after one position, through another; a page at a time, since fragments are large.

        Raises `ShardUnavailable` as `read` does.
        """
        while True:
            page = cast(Any, self._redis.xrange(self._keys.log, f"({after}", through, count=_PAGE))
            yield from self._with_bodies(self._parsed(page))
            if len(page) < _PAGE:
                return
            after = page[-1][0].decode()

    def trim(self, epoch: int, through: str) -> int:
        """Removes all entries up to and including `through`, and from the shards what the log names no more.

        Raises `Fenced` for an older trainer.
        """
        keys = [
            self._keys.flow, self._keys.log, self._keys.wakeups, self._keys.lost_bodies, self._keys.quarantine,
            self._keys.pushes,
        ]  # fmt: skip
        removed = cast(int, self._trim(keys, [epoch, through]))
        if removed < 0:
            raise Fenced(f"epoch {epoch} may not trim the log; a newer trainer has taken over")
        if self._bodies:
            self._bodies.sweep(self._redis)
        return int(removed)

    def holds(self, position: str) -> bool:
        """Whether the entry at this position is there (not trimmed, and not lost)."""
        return bool(self._redis.xrange(self._keys.log, position, position, count=1))

    def __len__(self) -> int:
        return self._redis.xlen(self._keys.log)


def id_order(position: str) -> tuple[int, int]:
    """A stream id as numbers, which is how ids compare."""
    milliseconds, _, seq = position.partition("-")
    return int(milliseconds), int(seq)


def before(position: str) -> str:
    """A stream id just before this one."""
    milliseconds, _, seq = position.partition("-")
    return f"{milliseconds}-{int(seq) - 1}" if int(seq) else f"{int(milliseconds) - 1}-{2**53}"


def whole_number(text: bytes) -> int:
    """The number in a field of an entry; 0 where a stranger wrote something else."""
    return int(text) if text.isdigit() and len(text) <= _MOST_DIGITS else 0


def _entry(id_: bytes, fields: dict[bytes, bytes], pushed: bool, quarantined: bool) -> LogEntry:
    """What was put in by hand gets through as well, to be counted."""
    if not pushed:
        return LogEntry(id_.decode(), STRANGERS, 0, 0, 0, b"", False)
    place = BodyPlace.decode(fields[b"body"]) if b"body" in fields else None
    return LogEntry(
        id_.decode(),
        fields.get(b"worker", b"").decode(errors="replace"),
        whole_number(fields.get(b"incarnation", b"")),
        whole_number(fields.get(b"seq", b"")),
        whole_number(fields.get(b"transitions", b"")),
        None if place else fields.get(b"fragment", b""),
        True,
        whole_number(fields.get(b"lost", b"")),
        place,
        quarantined=quarantined,
    )
