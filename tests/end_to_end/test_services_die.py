"""Embedded services that are killed under a run: each is started again by itself, and it is the same run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.processes.command_line import CommandLine
from tests.support.services.own_redis import OwnRedis

RUN = "services"
REDIS = r"\S*(redis|valkey)-server"
pytestmark = pytest.mark.timeout(300)


def send(terminal: CommandLine, pattern: str, number: int) -> None:
    """A signal to the process whose command line begins so, and not to one that it forks at this moment."""
    os.kill(min(pid for pid, command in terminal.left().items() if re.match(pattern, command)), number)


def start(terminal: CommandLine, *options: str) -> subprocess.Popen[str]:
    rollout = {"workers": 1, "fragment_steps": 16, "fragments_per_update": 2, "service_silent_seconds": 8}
    config = terminal.write_config(stop_at={"updates": 10**6}, checkpoint={"every": "10 updates"}, rollout=rollout)
    process = terminal.start("train", config, "--run-id", RUN, *options)
    terminal.until_checkpoint(RUN, 0)
    return process


def suffers(terminal: CommandLine, process: subprocess.Popen[str], faults: Sequence[tuple[int, str, str]]) -> None:
    """Signal by signal to the services of these names, each told of with these words, until the run ends in order."""
    for number, pattern, told in faults:
        send(terminal, pattern, number)
        terminal.wait_until(told, lambda told=told: told in terminal.output(process))  # type: ignore[misc]
        version = terminal.until_checkpoint(RUN, terminal.handle(RUN).status().version)
    assert not (terminal.store(RUN) / ".finished").exists()
    process.send_signal(signal.SIGINT)
    terminal.ended(process).ok()
    assert terminal.check_ended(RUN)["version"] >= version
    assert list(terminal.temporary.glob("sc-*")) == []


def test_dead_service_is_restarted_and_the_run_continues(terminal: CommandLine) -> None:
    """A Redis that hangs as well."""
    faults = [
        (signal.SIGKILL, REDIS, "Redis ended (code -9)"), (signal.SIGKILL, r"\S*rclone serve", "S3 server ended"),
        (signal.SIGSTOP, REDIS, "Redis hung (no reply for "),
    ]  # fmt: skip
    suffers(terminal, start(terminal, "--inline"), faults)


def test_hung_ray_is_reported_and_restarted(terminal: CommandLine) -> None:
    parts = ("raylet", "gcs_server")
    faults = [(signal.SIGSTOP, rf"\S*{part} ", f"Ray hung (no reply from its {part} for ") for part in parts]
    suffers(terminal, start(terminal), faults)


def test_silent_external_redis_pauses_the_run(
    terminal: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = OwnRedis(tmp_path / "own")
    monkeypatch.setenv("STAGECOACH_REDIS_PASSWORD", server.password)
    terminal.environ["STAGECOACH_REDIS_PASSWORD"] = server.password
    redis = {"url": f"redis://127.0.0.1:{server.port}/0", "timeout_seconds": 2}
    config = terminal.write_config(stop_at={"updates": 10**6}, checkpoint={"every": "10 updates"}, redis=redis)
    try:
        process = terminal.start("train", config, "--run-id", RUN, "--inline")
        version = terminal.until_checkpoint(RUN, 0)
        server.stopped(True)
        terminal.wait_until("the pause to be told", lambda: "paused" in terminal.output(process))
        assert "waits for: Redis, since " in terminal.run("status", RUN).ok()
        server.stopped(False)
        version = terminal.until_checkpoint(RUN, version)
        terminal.wait_until("the end of the pause", lambda: "Redis was away for " in terminal.output(process))
        time.sleep(2)
        assert terminal.output(process).count("Redis was away for ") == 1
        server.stopped(True)
        terminal.wait_until("another pause", lambda: "waits for: Redis, since " in terminal.run("status", RUN).out)
        process.send_signal(signal.SIGINT)
        time.sleep(3)  # the kernel makes one of two that come together
        process.send_signal(signal.SIGINT)
        done = terminal.ended(process)  # at once, although Redis cannot be asked
        assert done.code == 130, done
    finally:
        server.kill()


def test_detached_coordinator_outlives_its_ray(terminal: CommandLine) -> None:
    """Process 1 is its parent then, as in a container or a systemd unit; a driver of Ray's takes that for the death of
    its raylet as soon as a connection breaks."""
    rollout = {"workers": 2, "fragment_steps": 32, "fragments_per_update": 2, "silent_seconds": 120}
    config = terminal.write_config(rollout=rollout, stop_at={"updates": 10**6}, checkpoint={"every": "10 updates"})
    terminal.run("train", config, "--run-id", RUN, "--detach").ok()
    lock = terminal.folder / "runs" / RUN / "lock"
    coordinator = lock.read_text()
    version = terminal.until_checkpoint(RUN, 0)
    roles = [pid for pid, command in terminal.left().items() if command.startswith("ray::")]
    niceness = {os.getpriority(os.PRIO_PROCESS, pid) for pid in (*roles, int(coordinator))}
    assert len(roles) >= 3 and len(niceness) == 1, "Ray would put its workers last of all on the machine"
    for number, part in enumerate(("gcs_server", "raylet"), start=1):
        send(terminal, rf"\S*{part} ", signal.SIGKILL)
        log = terminal.folder / "runs" / RUN / "logs" / "coordinator.log"
        terminal.wait_until("Ray has died", lambda: log.read_text().count("starting it again") == number)  # noqa: B023
        terminal.wait_until("another Ray", lambda: log.read_text().count("Ray serves") == number + 1)  # noqa: B023
        reached = terminal.handle(RUN).status().version  # the former one's roles are gone by now
        version = terminal.until_checkpoint(RUN, reached)
    assert lock.read_text() == coordinator
    terminal.run("stop", RUN).ok()
    assert terminal.check_ended(RUN)["version"] >= version
