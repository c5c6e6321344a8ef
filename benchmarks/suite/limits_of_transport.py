"""How fast Redis, an S3 server, the fragment's codec and memory move bytes: one client, no product in between."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import boto3
import numpy as np
import redis

from benchmarks.suite.learning_alone import recorded
from benchmarks.suite.limits_of_acting import Work, cartpole
from benchmarks.suite.lone_run import LoneRun
from coordinator.services import BUCKET
from shared import fragment
from shared.connection import s3_keys

_MESSAGE_BYTES = 115_000
_OBJECT_BYTES = 1 << 20
_MEMORY_BYTES = 64 << 20
_DEPTH = 16
"""Commands in a pipeline."""


@contextmanager
def works() -> Iterator[list[Work]]:
    """All of them; the servers end with it."""
    with ExitStack() as running:
        run = running.enter_context(LoneRun.open(cartpole()))
        client = run.role.redis
        (item,) = recorded(cartpole(), 1)
        blob = fragment.encode(item)
        yield [
            Work("Redis: PING, one at a time", "commands/s", lambda: _pings(client)),
            Work(f"Redis: SET of {_MESSAGE_BYTES:,} bytes, {_DEPTH} in a pipeline", "bytes/s", _sets(client)),
            *_puts(run),
            Work(f"fragment of {len(blob):,} bytes: encode", "bytes/s", lambda: len(fragment.encode(item))),
            Work(f"fragment of {len(blob):,} bytes: decode", "bytes/s", lambda: _decoded(blob)),
            Work("memory: copy", "bytes/s", _copies()),
        ]


def _pings(client: redis.Redis) -> int:
    for _ in range(100):
        client.ping()
    return 100


def _sets(client: redis.Redis) -> Callable[[], int]:
    message = np.random.default_rng(1).bytes(_MESSAGE_BYTES)

    def call() -> int:
        with client.pipeline(transaction=False) as pipeline:
            for number in range(_DEPTH):
                pipeline.set(f"limits-{number}", message)
            pipeline.execute()
        return _DEPTH * len(message)

    return call


def _puts(run: LoneRun) -> list[Work]:
    address = run.role.address
    key, secret = s3_keys(address)
    client = boto3.client(
        "s3", endpoint_url=address.endpoint_url, aws_access_key_id=key, aws_secret_access_key=secret,
        region_name="us-east-1",
    )  # fmt: skip
    small, large = np.random.default_rng(1).bytes(100), np.random.default_rng(1).bytes(_OBJECT_BYTES)
    numbers = itertools.count()

    def put(body: bytes) -> int:
        client.put_object(Bucket=BUCKET, Key=f"limits/{next(numbers) % 64}", Body=body)
        return len(body)

    return [
        Work("S3 server: PUT of 100 bytes", "objects/s", lambda: put(small) // len(small)),
        Work(f"S3 server: PUT of {_OBJECT_BYTES:,} bytes", "bytes/s", lambda: put(large)),
    ]


def _decoded(blob: bytes) -> int:
    fragment.decode(blob)
    return len(blob)


def _copies() -> Callable[[], int]:
    source = np.random.default_rng(1).integers(0, 256, _MEMORY_BYTES, np.uint8)
    target = np.empty_like(source)

    def call() -> int:
        np.copyto(target, source)
        return len(source)

    return call
