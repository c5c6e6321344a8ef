"""The embedded Redis and S3 server are killed: each comes back at its address, over its data, within a limit."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from stagecoach.coordinator.lifecycle.preparation import create_flow
from stagecoach.coordinator.services.embedded import Service, SocketFolder
from stagecoach.coordinator.services.restarter import Restarter
from stagecoach.shared.protocol.events import read_events
from stagecoach.shared.protocol.flow_control import RunState
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.runtime.run_context import RunContext, open_run_context
from tests.conftest import minimal_config
from tests.support.processes.command_line import own_servers
from tests.support.processes.waiting import eventually


@dataclass
class Kept:
    """Two services, their restarter, and a role that uses them."""

    redis: Service
    s3: Service
    restarter: Restarter
    role: RunContext
    given_up: threading.Event

    def told(self) -> list[str]:
        """What the events say of services."""
        events = read_events(self.role.redis, "kept", block_seconds=5.0)
        return [event.text for event in events if event.kind == "service"]


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[Callable[..., Kept]]:
    with ExitStack() as running:

        def make(socket_path: Path | None = None, **rollout: Any) -> Kept:
            servers = running.enter_context(own_servers(tmp_path, socket_path))
            config = minimal_config(rollout={"fragments_per_update": 2, "fragment_steps": 8} | rollout)
            role = open_run_context(config, servers.address("kept"))
            running.callback(role.redis.close)
            create_flow(role)
            given_up = threading.Event()
            restarter = Restarter((servers.redis, servers.s3), [tmp_path / "redis.log"], role, given_up.set)
            running.callback(restarter.stop)
            return Kept(servers.redis, servers.s3, restarter, role, given_up)

        yield make


def kill(service: Service, number: int = signal.SIGKILL) -> None:
    """Ends its process as a fault does, and waits until a new one serves in its place."""
    before = service.process.pid
    os.kill(before, number)
    eventually(lambda: service.process.pid != before and serves(service))


def serves(service: Service) -> bool:
    try:
        return service.ready(service.port)
    except (OSError, redis.RedisError):
        return False


def test_services_that_are_killed_come_back_with_their_data(keep: Callable[..., Kept]) -> None:
    kept = keep()
    role, port, store = kept.role, kept.redis.port, kept.role.checkpoints.store
    role.redis.config_set("appendfsync", "no")  # `everysec` writes up to 2 s late where the disk is slow
    role.flow.set_state(RunState.STOPPING, "a reason")
    kill(kept.redis)
    state = role.flow.read()  # tries again until it is there
    assert (state.state, state.reason) == ("stopping", "a reason")
    assert kept.redis.port == port
    kill(kept.redis)
    assert role.flow.read().state == "stopping"
    assert "Redis ended (code -9) and was restarted" in kept.told()[0]
    store.put("before", b"1")
    kill(kept.s3)
    assert store.get("before") == b"1"
    store.put("after", b"2")
    assert set(store.keys("")) == {"before", "after"}


@pytest.mark.parametrize("which", ["redis", "s3"])
def test_hung_service_is_restarted(keep: Callable[..., Kept], which: str) -> None:
    kept = keep(service_silent_seconds=3)
    service: Service = getattr(kept, which)
    kept.role.checkpoints.store.put("before", b"1")
    kept.role.redis.config_set("appendfsync", "always")
    kept.role.flow.set_state(RunState.STOPPING, "a reason")
    kill(service, signal.SIGSTOP)
    assert kept.role.flow.read().reason == "a reason"
    assert kept.role.checkpoints.store.get("before") == b"1"
    assert f"{service.name} hung (no reply for " in kept.told()[0]
    assert kept.restarter.failure is None


def test_redis_whose_socket_is_removed_is_restarted(keep: Callable[..., Kept]) -> None:
    """As a cleaner of /tmp does: connections live on, and new ones are impossible."""
    with closing(SocketFolder()) as folder:
        kept = keep(folder.socket)
        kept.role.flow.set_state(RunState.STOPPING, "a reason")
        before = kept.redis.process.pid
        shutil.rmtree(folder.socket.parent)
        eventually(lambda: kept.redis.process.pid != before and serves(kept.redis))
        assert folder.socket.parent.stat().st_mode & 0o777 == 0o700
        assert kept.role.flow.read().reason == "a reason"
        assert "lost its socket" in kept.told()[0]


def test_briefly_stopped_service_is_not_restarted(keep: Callable[..., Kept]) -> None:
    kept = keep(service_silent_seconds=30)
    before = kept.redis.process.pid
    for _ in range(2):
        os.kill(before, signal.SIGSTOP)
        time.sleep(3.0)
        os.kill(before, signal.SIGCONT)
        assert kept.role.flow.read().state == "running"
    assert kept.redis.process.pid == before


def test_service_is_restarted_while_run_progresses(keep: Callable[..., Kept]) -> None:
    kept = keep(restarts_allowed=0)
    for number in range(4):
        kept.role.redis.hset(RunKeys("kept").flow, "committed_id", f"{number}-0")  # a fragment was learned from
        time.sleep(2.5)  # the restarter looks once a second
        if number:
            kill(kept.s3)
    assert kept.restarter.failure is None


def test_dying_service_is_given_up_with_diagnostics(keep: Callable[..., Kept]) -> None:
    kept = keep(restarts_allowed=1)
    kill(kept.s3)
    assert kept.restarter.failure is None
    os.kill(kept.s3.process.pid, signal.SIGKILL)
    assert kept.given_up.wait(60)
    said = str(kept.restarter.failure)
    assert "S3 server ended (code -9), 2 times in a row without progress of the run (rollout.restarts_allowed)" in said
    assert "; its log ends with:" in said and "Starting s3 server" in said
    assert kept.redis.alive


def test_service_log_is_rotated_while_written(
    keep: Callable[..., Kept], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stagecoach.shared.runtime.launch._LOG_BYTES", 4000)
    monkeypatch.setattr("stagecoach.coordinator.services.restarter._ROTATE_SECONDS", 0.1)
    kept = keep()
    logs = [tmp_path / f"redis.log{suffix}" for suffix in ("", ".1", ".2", ".3")]
    kept.role.redis.config_set("loglevel", "verbose")  # so that each connection is a line
    eventually(lambda: serves(kept.redis) and all(path.exists() for path in logs))
    kept.restarter.stop()
    kept.role.redis.config_set("loglevel", "notice")
    assert not (tmp_path / "redis.log.4").exists()
    before = kept.redis.log.stat().st_size
    kept.redis.stop()
    assert kept.redis.log.stat().st_size > before and "bye bye" in kept.redis.log.read_text(errors="replace")


def test_stopped_restarter_starts_nothing(keep: Callable[..., Kept]) -> None:
    kept = keep()
    kept.restarter.stop()
    kept.redis.stop()
    time.sleep(0.5)
    assert not kept.redis.alive
