"""Redis as it is: messages of one size added to a stream and read from it, with nothing around them."""

from __future__ import annotations

import os
import time
from typing import Any, cast

import redis

_STREAM = "raw"
_LUA = "return redis.call('XADD', KEYS[1], '*', 'fragment', ARGV[1])"
_BATCH_BYTES, _MOST_IN_A_BATCH = 1 << 20, 64
"""One pipeline carries about this much: less waits for answers, more fills buffers (both were tried)."""


def batch(size: int) -> int:
    """How many messages of this size go into one pipeline."""
    return max(2, min(_MOST_IN_A_BATCH, _BATCH_BYTES // size))


class RawProducer:
    """One connection that adds."""

    def __init__(self, url: str, password: str) -> None:
        self._redis = redis.Redis.from_url(url, password=password)
        self._lua = self._redis.script_load(_LUA)

    def pipelined(self, size: int, count: int) -> float:
        """Answers when it began, by the monotonic clock in seconds."""
        body, at_once = os.urandom(size), batch(size)
        began = time.monotonic()
        while count > 0:
            pipeline = self._redis.pipeline(transaction=False)
            for _ in range(min(at_once, count)):
                pipeline.xadd(_STREAM, {"fragment": body})
            pipeline.execute()
            count -= at_once
        return began

    def one_by_one(self, size: int, count: int) -> float:
        """Each waits for its answer."""
        body = os.urandom(size)
        began = time.monotonic()
        for _ in range(count):
            self._redis.xadd(_STREAM, {"fragment": body})
        return began

    def by_script(self, size: int, count: int) -> float:
        """Each is added by the shortest Lua script there can be, and waits for its answer."""
        body = os.urandom(size)
        began = time.monotonic()
        for _ in range(count):
            self._redis.evalsha(self._lua, 1, _STREAM, body)
        return began


class RawConsumer:
    """One connection that reads, and removes what it has read as often as the product does."""

    def __init__(self, url: str, password: str) -> None:
        self._redis = redis.Redis.from_url(url, password=password)

    def consume(self, size: int, count: int, at_once: int, trim_each: int) -> float:
        """Answers when the last message was here; raises `RuntimeError` for one of another size."""
        last, trimmed, got = b"0-0", 0, 0
        while got < count:
            answer = cast(Any, self._redis.xread({_STREAM: last}, count=at_once, block=1000))
            for id_, fields in _entries(answer):
                if len(fields[b"fragment"]) != size:
                    raise RuntimeError(f"a message of {len(fields[b'fragment'])} bytes, expected {size}")
                last, got = id_, got + 1
            if got - trimmed >= trim_each:
                trimmed = got
                self._redis.xtrim(_STREAM, minid=last, approximate=False)
        return time.monotonic()


def _entries(answer: Any) -> Any:
    """Of the one stream; redis-py answers a list or a dictionary, as the protocol's version is."""
    if not answer:
        return []
    return answer[0][1] if isinstance(answer, list) else next(iter(answer.values()))[0]
