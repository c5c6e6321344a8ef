"""The embedded Redis and S3 server are killed: each comes back on its port, over its data; within a limit that ends."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
import redis

from coordinator.keeper import Keeper
from coordinator.preparation import create_flow
from coordinator.services import BUCKET, Service, start_redis, start_s3
from shared.connection import Address
from shared.events import read_events
from shared.redis_keys import RunKeys
from shared.role import Role, open_role
from tests.conftest import minimal_config
from tests.support.speed import stretched


@dataclass
class Kept:
    """Two services, their keeper, and a role that uses them."""

    redis: Service
    s3: Service
    keeper: Keeper
    role: Role
    given_up: threading.Event


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[Callable[..., Kept]]:
    with ExitStack() as running:

        def make(**rollout: Any) -> Kept:
            config = minimal_config(rollout={"fragments_per_update": 2, "fragment_steps": 8} | rollout)
            services = (
                start_redis(tmp_path / "redis", tmp_path / "redis.log", "secret"),
                start_s3(tmp_path / "s3", tmp_path / "s3.log", "access", "secret"),
            )
            for service in services:
                running.callback(service.stop)
            secrets = {"redis_password": "secret", "s3_access_key": "access", "s3_secret_key": "secret"}
            (tmp_path / "keys.json").write_text(json.dumps(secrets))
            address = Address(
                "kept", f"redis://127.0.0.1:{services[0].port}/0", f"s3://{BUCKET}",
                f"http://127.0.0.1:{services[1].port}", str(tmp_path / "keys.json"),
            )  # fmt: skip
            role = open_role(config, address)
            running.callback(role.redis.close)
            create_flow(role)
            keeper, given_up = Keeper(services, config, [tmp_path / "redis.log"]), threading.Event()
            running.callback(keeper.stop)
            keeper.start(role, given_up.set)
            return Kept(*services, keeper, role, given_up)

        yield make


def kill(service: Service) -> int:
    """Ends its process as a fault does, and waits until a new one serves in its place."""
    before = service.process.pid
    os.kill(before, signal.SIGKILL)
    until(lambda: service.process.pid != before and serves(service))
    return before


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + stretched(60)
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def serves(service: Service) -> bool:
    try:
        return service.ready(service.port)
    except (OSError, redis.RedisError):
        return False


def test_a_redis_that_is_killed_comes_back_with_its_data(keep: Callable[..., Kept]) -> None:
    kept = keep()
    role, port = kept.role, kept.redis.port
    role.redis.config_set("appendfsync", "no")  # `everysec` writes up to 2 s late where the disk is slow
    role.flow.set_state("stopping", "a reason")
    kill(kept.redis)
    state = role.flow.read()  # tries again until it is there
    assert (state.state, state.reason) == ("stopping", "a reason")
    assert kept.redis.port == port
    kill(kept.redis)
    assert role.flow.read().state == "stopping"
    told = [event for event in read_events(role.redis, "kept", block_seconds=5.0) if event.kind == "service"]
    assert told and "Redis ended (code -9) and was started again" in told[0].text


def test_an_s3_server_that_is_killed_comes_back_with_its_objects(keep: Callable[..., Kept]) -> None:
    kept = keep()
    store = kept.role.checkpoints.store
    store.put("before", b"1")
    kill(kept.s3)
    assert store.get("before") == b"1"
    store.put("after", b"2")
    client = boto3.client(
        "s3", endpoint_url=f"http://127.0.0.1:{kept.s3.port}", region_name="us-east-1",
        aws_access_key_id="access", aws_secret_access_key="secret",
    )  # fmt: skip
    listed = client.list_objects_v2(Bucket=BUCKET)["Contents"]
    client.close()
    assert {item["Key"] for item in listed} == {"kept/before", "kept/after"}


@pytest.mark.parametrize("which", ["redis", "s3"])
def test_one_that_hangs_is_started_again(keep: Callable[..., Kept], which: str) -> None:
    kept = keep(service_silent_seconds=3)
    service: Service = getattr(kept, which)
    kept.role.checkpoints.store.put("before", b"1")
    kept.role.redis.config_set("appendfsync", "always")
    kept.role.flow.set_state("stopping", "a reason")
    before = service.process.pid
    os.kill(before, signal.SIGSTOP)
    until(lambda: service.process.pid != before and serves(service))
    assert kept.role.flow.read().reason == "a reason"
    assert kept.role.checkpoints.store.get("before") == b"1"
    told = [event.text for event in read_events(kept.role.redis, "kept", block_seconds=5.0) if event.kind == "service"]
    assert told and f"{service.name} hung (no answer for " in told[0]
    assert kept.keeper.failure is None


def test_one_that_is_stopped_for_a_moment_is_not_taken_for_hung(keep: Callable[..., Kept]) -> None:
    kept = keep(service_silent_seconds=30)
    before = kept.redis.process.pid
    for _ in range(2):
        os.kill(before, signal.SIGSTOP)
        time.sleep(3.0)
        os.kill(before, signal.SIGCONT)
        assert kept.role.flow.read().state == "running"
    assert kept.redis.process.pid == before


def test_what_dies_again_and_again_while_the_run_makes_progress_is_started_again(keep: Callable[..., Kept]) -> None:
    kept = keep(restarts_allowed=0)
    for number in range(4):
        kept.role.redis.hset(RunKeys("kept").flow, "settled_id", f"{number}-0")  # a fragment was learnt from
        time.sleep(2.5)  # the keeper looks once a second
        if number:
            kill(kept.s3)
    assert kept.keeper.failure is None


def test_one_that_dies_again_and_again_is_given_up_with_its_last_words(keep: Callable[..., Kept]) -> None:
    kept = keep(restarts_allowed=1)
    kill(kept.s3)
    assert kept.keeper.failure is None
    os.kill(kept.s3.process.pid, signal.SIGKILL)
    assert kept.given_up.wait(60)
    assert (
        "S3 server ended (code -9), 2 times in a row without progress of the run (rollout.restarts_allowed); it says:"
        in str(kept.keeper.failure)
    )
    assert "Starting s3 server" in str(kept.keeper.failure)
    assert kept.redis.alive


def test_the_log_of_a_service_is_rotated_while_it_writes(
    keep: Callable[..., Kept], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.launch._LOG_BYTES", 4000)
    monkeypatch.setattr("coordinator.keeper._ROTATE_SECONDS", 0.1)
    kept = keep()
    logs = [tmp_path / f"redis.log{suffix}" for suffix in ("", ".1", ".2", ".3")]

    kept.role.redis.config_set("loglevel", "verbose")  # so that each connection is a line

    def written() -> bool:
        return serves(kept.redis) and all(path.exists() for path in logs)

    until(written)
    kept.keeper.stop()
    kept.role.redis.config_set("loglevel", "notice")
    assert not (tmp_path / "redis.log.4").exists()
    before = kept.redis.log.stat().st_size
    kept.redis.stop()
    assert kept.redis.log.stat().st_size > before and "bye bye" in kept.redis.log.read_text(errors="replace")


def test_a_keeper_that_is_stopped_starts_nothing(keep: Callable[..., Kept]) -> None:
    kept = keep()
    kept.keeper.stop()
    kept.redis.stop()
    time.sleep(0.5)
    assert not kept.redis.alive
