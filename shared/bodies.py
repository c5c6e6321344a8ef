"""Fragment bodies on servers of their own (`redis.shards`): the log keeps the order and each body's place, the shards
the bytes.

A body is written before the push that names it in the log. So whatever the log names was there; what it does not name,
and what no push can name any more, is garbage that the next sweep removes. A sweep needs no memory of its own and no
fencing: it looks at the shards first and at the log second, and what is not needed by then never will be.
"""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import redis
import xxhash

from shared import scripts
from shared.connection import passes
from shared.errors import RedisUnavailable, ShardFull, ShardUnavailable
from shared.redis_keys import RunKeys
from shared.script_calls import Step

_LOGGER = logging.getLogger("stagecoach.shards")
_PLACES = (
    scripts.COMMON
    + """
-- KEYS log, pushes. Where the log has its bodies on shards: {worker, place, worker, place, ...}.
local named = {}
each_entry(KEYS[1], KEYS[2], '0-0', function(fields, ours)
  if ours and fields['body'] then
    named[#named + 1] = fields['worker'] or '?'
    named[#named + 1] = fields['body']
  end
end)
return named
"""
)
_MOST_DIGITS = 16
_SIZE = re.compile("[0-9]{1,15}")
_PAGE = 512
"""Bodies removed with one command."""


@dataclass(frozen=True)
class BodyPlace:
    """Where a fragment's body is, as its log entry says."""

    shard: str
    """`host:port/db`."""
    field: str
    """`incarnation:seq:digest` in the worker's hash there; so other contents never have the same place."""
    size: int

    def encode(self) -> bytes:
        """The inverse is `decode`."""
        return f"{self.shard} {self.field} {self.size}".encode()

    @classmethod
    def decode(cls, text: bytes) -> BodyPlace | None:
        """None for what somebody else wrote."""
        parts = text.decode(errors="replace").split(" ")
        return cls(parts[0], parts[1], int(parts[2])) if len(parts) == 3 and _SIZE.fullmatch(parts[2]) else None


class Bodies:
    """The bodies of one run's fragments on its shards; false where it has none, and the log holds the bodies itself."""

    def __init__(self, shards: Mapping[str, redis.Redis], run_id: str) -> None:
        self._shards = dict(shards)
        self._keys = RunKeys(run_id)

    def __bool__(self) -> bool:
        return bool(self._shards)

    @property
    def names(self) -> tuple[str, ...]:
        """The shards, as `host:port/db`, in the config's order."""
        return tuple(self._shards)

    def put(self, worker: str, incarnation: int, seq: int, body: bytes) -> BodyPlace:
        """Writes one body, safe to repeat; each worker's go to one shard after the other.

        Raises `ShardUnavailable`, or `ShardFull`.
        """
        shard = self.names[(zlib.crc32(worker.encode()) + seq) % len(self._shards)]
        place = BodyPlace(shard, f"{incarnation}:{seq}:{xxhash.xxh3_128_hexdigest(body)}", len(body))
        with _reaching(shard):
            self._shards[shard].hset(self._keys.bodies(worker), place.field, cast(Any, body))
        return place

    def remove(self, worker: str, place: BodyPlace) -> None:
        """Takes back a body that no entry names; where the shard is away a sweep will."""
        try:
            with _reaching(place.shard):
                self._shards[place.shard].hdel(self._keys.bodies(worker), place.field)
        except ShardUnavailable as error:
            _LOGGER.warning("%s; a later sweep removes %s of %s", error, place.field, worker)

    def fetch(self, wanted: Sequence[tuple[str, BodyPlace]]) -> list[bytes | None]:
        """The bodies of these workers at these places, with one round trip for each shard; None for what is not there.

        Raises `ShardUnavailable` for one of them; then nothing is answered.
        """
        found: list[bytes | None] = [None] * len(wanted)
        for shard, client in self._shards.items():
            there = [index for index, (_, place) in enumerate(wanted) if place.shard == shard]
            if not there:
                continue
            with _reaching(shard):
                pipeline = client.pipeline(transaction=False)
                for index in there:
                    worker, place = wanted[index]
                    pipeline.hget(self._keys.bodies(worker), place.field)
                answers = cast(list[bytes | None], pipeline.execute())
            for index, body in zip(there, answers, strict=True):
                found[index] = body
        return found

    def sweep(self, index: redis.Redis) -> int:
        """Removes what no entry of the log names and no push can name any more; answers how many bodies.

        A shard that is away is left to the next sweep.
        """
        known = cast(dict[bytes, bytes], index.hgetall(self._keys.incarnations))
        workers = [name.decode(errors="replace") for name in known]
        held = {shard: self._held(shard, workers) for shard in self._shards}
        needed = Needed.read(index, self._keys.run_id)
        removed = 0
        for shard, by_worker in held.items():
            for worker, fields in by_worker.items():
                garbage = [field for field in fields if not needed.keeps(shard, worker, field)]
                removed += self._remove_all(shard, worker, garbage)
        return removed

    def _held(self, shard: str, workers: Sequence[str]) -> dict[str, list[str]]:
        """Worker → fields of its bodies; nothing where the shard is away."""
        try:
            with _reaching(shard):
                pipeline = self._shards[shard].pipeline(transaction=False)
                for worker in workers:
                    pipeline.hkeys(self._keys.bodies(worker))
                answers = cast(list[list[bytes]], pipeline.execute())
        except ShardUnavailable as error:
            _LOGGER.warning("%s; it is swept the next time", error)
            return {}
        return {
            worker: [field.decode(errors="replace") for field in fields]
            for worker, fields in zip(workers, answers, strict=True)
        }

    def _remove_all(self, shard: str, worker: str, fields: Sequence[str]) -> int:
        try:
            with _reaching(shard):
                for start in range(0, len(fields), _PAGE):
                    self._shards[shard].hdel(self._keys.bodies(worker), *fields[start : start + _PAGE])
        except ShardUnavailable as error:
            _LOGGER.warning("%s; %d bodies of %s are removed the next time", error, len(fields), worker)
            return 0
        return len(fields)


def named_bodies(index: redis.Redis, run_id: str) -> list[tuple[str, BodyPlace]]:
    """Worker and place of every body that the log names on a shard."""
    keys = RunKeys(run_id)
    answer = Step(index, _PLACES)([keys.log, keys.pushes], [])
    places = [(worker, BodyPlace.decode(text)) for worker, text in zip(answer[::2], answer[1::2], strict=True)]
    return [(worker.decode(errors="replace"), place) for worker, place in places if place is not None]


def bytes_by_shard(index: redis.Redis, run_id: str) -> dict[str, int]:
    """Shard → bytes of the bodies there that the log names."""
    sizes: dict[str, int] = {}
    for _, place in named_bodies(index, run_id):
        sizes[place.shard] = sizes.get(place.shard, 0) + place.size
    return sizes


@dataclass(frozen=True)
class Needed:
    """Which bodies the log names, and which ones a push may still name."""

    named: frozenset[tuple[str, str, str]]
    """Shard, worker, field."""
    lives: dict[str, int]
    pushed: dict[str, int]

    @classmethod
    def read(cls, index: redis.Redis, run_id: str) -> Needed:
        """From the server that has the log: what was pushed first, then the log, which has it or had it."""
        keys = RunKeys(run_id)
        lives, pushed = (
            {
                name.decode(errors="replace"): int(value)
                for name, value in cast(dict[bytes, bytes], index.hgetall(key)).items()
                if value.isdigit() and len(value) < _MOST_DIGITS  # `tries` may be below zero
            }
            for key in (keys.incarnations, keys.pushed)
        )
        named = frozenset((place.shard, worker, place.field) for worker, place in named_bodies(index, run_id))
        return cls(named, lives, pushed)

    def keeps(self, shard: str, worker: str, field: str) -> bool:
        """Whether the body is named, or its push may still come: of the worker's present life, after its last one."""
        if (shard, worker, field) in self.named:
            return True
        incarnation, _, rest = field.partition(":")
        seq = rest.partition(":")[0]
        if not (incarnation.isdecimal() and seq.isdecimal()):
            return False  # somebody else's
        alive = int(incarnation) >= self.lives.get(worker, 0) - 1
        return alive and int(seq) > self.pushed.get(f"{worker}:{incarnation}", -1)


@contextmanager
def _reaching(shard: str) -> Iterator[None]:
    """Names the shard in what its server, or the way to it, raises."""
    try:
        yield
    except redis.OutOfMemoryError:
        raise ShardFull(
            f"the Redis shard {shard} has no memory left (maxmemory); a durable checkpoint frees some"
        ) from None
    except (redis.AuthenticationError, redis.exceptions.NoPermissionError) as error:
        raise RedisUnavailable(f"the Redis shard {shard} refuses the credentials: {error}") from None
    except Exception as error:
        if not passes(error):
            raise
        raise ShardUnavailable(f"the Redis shard {shard} cannot be used: {error}") from None
