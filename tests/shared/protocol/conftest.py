"""Shards for the tests of bodies: to the clients, other databases of the tests' Redis are other servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import redis

from tests.conftest import RedisServer


@pytest.fixture
def shards(redis_server: RedisServer) -> Iterator[dict[str, redis.Redis]]:
    """Name → connection."""
    with ExitStack() as stack:
        url, options = redis_server.url, {"password": redis_server.password, "socket_timeout": 60.0}
        yield {f"shard/{db}": stack.enter_context(redis.Redis.from_url(url, db=db, **options)) for db in (1, 2, 3)}
