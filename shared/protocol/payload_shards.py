"""Bodies of fragments outside the log, in shared memory or on further Redis servers: written before the push, fetched
by the page, swept after a trim."""

import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import redis
import xxhash

from stagecoach.shared.base.errors import RedisUnavailable, ShardFull, ShardUnavailable
from stagecoach.shared.experience.log_entry import BodyPlace
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.redis_client import passes
from stagecoach.shared.protocol.scripts import Script
from stagecoach.shared.protocol.shared_memory import AT_LEAST, PLACE, SharedMemory

_LOGGER = logging.getLogger("stagecoach.shards")
_MOST_DIGITS = 16
_PAGE = 512


class Bodies:
    """The bodies of one run's fragments outside its log; false if the log holds all of them."""

    def __init__(self, shards: Mapping[str, redis.Redis], run_id: str, memory: SharedMemory | None = None) -> None:
        self._shards, self._keys = dict(shards), RunKeys(run_id)
        self.memory = memory or SharedMemory()

    def __bool__(self) -> bool:
        return bool(self._shards) or bool(self.memory)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the shards."""
        return tuple(self._shards)

    def share(self, worker: str, incarnation: int, seq: int, body: bytes, token: str) -> BodyPlace | None:
        """Writes one body to the shared memory of this token, safe to repeat; returns None if it should go elsewhere:
        this process does not see that memory, it has no room, or the body is too small to gain."""
        if len(body) < AT_LEAST or not token or token != self.memory.token:
            return None
        place = BodyPlace(PLACE, _field(incarnation, seq, body), len(body))
        return place if self.memory.put(f"{worker}:{place.field}", body) else None

    def put(self, worker: str, incarnation: int, seq: int, body: bytes) -> BodyPlace:
        """Writes one body, safe to repeat; each worker's go to the shards in turn. Raises `ShardUnavailable`."""
        shard = self.names[(zlib.crc32(worker.encode()) + seq) % len(self._shards)]
        place = BodyPlace(shard, _field(incarnation, seq, body), len(body))
        with _reaching(shard):
            self._shards[shard].hset(self._keys.bodies(worker), place.field, cast(Any, body))
        return place

    def remove(self, worker: str, place: BodyPlace) -> None:
        """Removes a body that no entry names; if the shard is away, a later sweep does."""
        if place.shard == PLACE:
            self.memory.remove([f"{worker}:{place.field}"])
            return
        with _unless_away(place.shard, f"a later sweep removes {place.field} of {worker}"):
            self._shards[place.shard].hdel(self._keys.bodies(worker), place.field)

    def fetch(self, wanted: Sequence[tuple[str, BodyPlace]]) -> list[bytes | None]:
        """Returns the bodies at these places of workers, with one round trip per shard; None for a missing one. Raises
        `ShardUnavailable`."""
        found: list[bytes | None] = [None] * len(wanted)
        for index, (worker, place) in enumerate(wanted):
            if place.shard == PLACE:
                found[index] = self.memory.get(f"{worker}:{place.field}", place.size)
        for shard, client in self._shards.items():
            there = [index for index, (_, place) in enumerate(wanted) if place.shard == shard]
            if not there:
                continue
            with _reaching(shard):
                pipeline = client.pipeline(transaction=False)
                for index in there:
                    worker, place = wanted[index]
                    pipeline.hget(self._keys.bodies(worker), place.field)
                bodies = cast(list[bytes | None], pipeline.execute())
            for index, body in zip(there, bodies, strict=True):
                found[index] = body
        return found

    def sweep(self, index: redis.Redis) -> int:
        """Removes what no entry of the log names and no push can name any more; returns how many bodies."""
        shared = self.memory.names()
        if not shared and not self._shards:
            return 0
        workers = [name.decode(errors="replace") for name in cast(Any, index.hgetall(self._keys.incarnations))]
        held: list[tuple[str, str, list[str]]] = []
        for shard, client in self._shards.items():
            with _unless_away(shard, "it is swept the next time"):
                pipeline = client.pipeline(transaction=False)
                for worker in workers:
                    pipeline.hkeys(self._keys.bodies(worker))
                for worker, fields in zip(workers, pipeline.execute(), strict=True):
                    held.append((shard, worker, [field.decode(errors="replace") for field in fields]))
        needed = _needed(index, self._keys)
        removed = self.memory.remove(name for name in shared if not needed(PLACE, *name.split(":", 1)))
        for shard, worker, fields in held:
            garbage = [field for field in fields if not needed(shard, worker, field)]
            with _unless_away(shard, f"{len(garbage)} bodies of {worker} are removed the next time"):
                for start in range(0, len(garbage), _PAGE):
                    page = garbage[start : start + _PAGE]
                    removed += self._shards[shard].hdel(self._keys.bodies(worker), *page)
        return removed


def named_bodies(index: redis.Redis, run_id: str) -> list[tuple[str, BodyPlace]]:
    pairs = iter(Script(index, RunKeys(run_id), "body_places")())
    places = [(worker, BodyPlace.decode(text)) for worker, text in zip(pairs, pairs, strict=True)]
    return [(worker.decode(errors="replace"), place) for worker, place in places if place is not None]


def bytes_by_shard(index: redis.Redis, run_id: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for _, place in named_bodies(index, run_id):
        sizes[place.shard] = sizes.get(place.shard, 0) + place.size
    return sizes


def _needed(index: redis.Redis, keys: RunKeys) -> Callable[[str, str, str], bool]:
    """Returns a test whether the log names a body (shard, worker, field), or a push of the worker's current process may
    still. Reads what was pushed first, then the log, which has it or had it."""
    incarnations, pushed = (
        {
            name.decode(errors="replace"): int(value)
            for name, value in cast(dict[bytes, bytes], index.hgetall(key)).items()
            if value.isdigit() and len(value) < _MOST_DIGITS  # `tries` may be below zero
        }
        for key in (keys.incarnations, keys.pushed)
    )
    named = {(place.shard, worker, place.field) for worker, place in named_bodies(index, keys.run_id)}

    def needed(shard: str, worker: str, field: str) -> bool:
        incarnation, seq = (*field.split(":"), "")[:2]
        if (shard, worker, field) in named:
            return True
        if not (incarnation.isdecimal() and seq.isdecimal()):
            return False  # another program's
        alive = int(incarnation) >= incarnations.get(worker, 0) - 1
        return alive and int(seq) > pushed.get(f"{worker}:{incarnation}", -1)

    return needed


def _field(incarnation: int, seq: int, body: bytes) -> str:
    return f"{incarnation}:{seq}:{xxhash.xxh3_128_hexdigest(body)}"


@contextmanager
def _unless_away(shard: str, then: str) -> Iterator[None]:
    """Logs a warning with the consequence if the shard is away."""
    try:
        with _reaching(shard):
            yield
    except ShardUnavailable as error:
        _LOGGER.warning("%s; %s", error, then)


@contextmanager
def _reaching(shard: str) -> Iterator[None]:
    """Names the shard in what its server, or the way to it, raises."""
    try:
        yield
    except redis.OutOfMemoryError:
        remedy = "a durable checkpoint frees some"
        raise ShardFull(f"the Redis shard {shard} has no memory left (maxmemory); {remedy}") from None
    except (redis.AuthenticationError, redis.exceptions.NoPermissionError) as error:
        raise RedisUnavailable(f"the Redis shard {shard} refuses the credentials: {error}") from None
    except Exception as error:
        if not passes(error):
            raise
        raise ShardUnavailable(f"the Redis shard {shard} cannot be used: {error}") from None
