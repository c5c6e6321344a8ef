"""Embedded services that are killed under a run: each is started again by itself, and it is the same run."""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.end_to_end.command_line import CommandLine, check_ledger

RUN = "services"
pytestmark = pytest.mark.timeout(300)


def kill(terminal: CommandLine, pattern: str) -> None:
    """SIGKILL to the process whose command line begins so, and not to one that it forks at this moment."""
    os.kill(min(pid for pid, command in terminal.left().items() if re.match(pattern, command)), signal.SIGKILL)


def goes_on(terminal: CommandLine, beyond: int) -> int:
    """Waits for new versions and a checkpoint of them; answers the version."""
    return terminal.until(
        RUN, f"a checkpoint after version {beyond}",
        lambda status: int((status.latest or "-1").partition("_")[0]) > beyond,
    ).version  # fmt: skip


@pytest.mark.parametrize(
    ("options", "killed"),
    [
        (["--inline"], {r"\S*(redis|valkey)-server": "Redis ended (code -9)", r"\S*rclone serve": "S3 server ended"}),
        ([], {r"\S*raylet ": "Ray has died"}),
    ],
    ids=["redis and s3", "raylet"],
)
def test_what_dies_is_started_again_and_the_run_goes_on(
    terminal: CommandLine, options: list[str], killed: dict[str, str]
) -> None:
    config = terminal.write_config(stop_at={"updates": 10**6}, checkpoint={"every": "10 updates"})
    process = terminal.start("train", config, "--run-id", RUN, *options)
    version = goes_on(terminal, 0)
    for pattern, told in killed.items():
        kill(terminal, pattern)
        terminal.wait_until(told, lambda told=told: told in terminal.output(process))  # type: ignore[misc]
        version = goes_on(terminal, terminal.handle(RUN).status().version)
    assert not (terminal.store(RUN) / ".finished").exists()
    process.send_signal(signal.SIGINT)
    done = terminal.ended(process)
    assert done.code == 0, done
    finished = terminal.marker(RUN, ".finished")
    assert (finished["reason"], finished["version"] >= version) == ("stopped", True)
    check_ledger(finished)
    terminal.check_nothing_left()
    assert list(terminal.temporary.glob("sc-*")) == []


def test_a_coordinator_whose_parent_has_ended_outlives_its_ray(terminal: CommandLine) -> None:
    """Process 1 is its parent then, as in a container or a systemd unit; a driver of Ray's takes that for the death of
    its raylet as soon as a connection breaks."""
    rollout = {"workers": 2, "fragment_steps": 32, "fragments_per_update": 2, "silent_seconds": 120}
    config = terminal.write_config(rollout=rollout, stop_at={"updates": 10**6}, checkpoint={"every": "10 updates"})
    assert terminal.run("train", config, "--run-id", RUN, "--detach").code == 0
    lock = terminal.folder / "runs" / RUN / "lock"
    coordinator = lock.read_text()
    version = goes_on(terminal, 0)
    roles = [pid for pid, command in terminal.left().items() if command.startswith("ray::")]
    niceness = {os.getpriority(os.PRIO_PROCESS, pid) for pid in (*roles, int(coordinator))}
    assert len(roles) >= 3 and len(niceness) == 1, "Ray would put its workers last of all on the machine"
    for number, part in enumerate(("gcs_server", "raylet"), start=1):
        kill(terminal, rf"\S*{part} ")
        log = terminal.folder / "runs" / RUN / "logs" / "coordinator.log"
        terminal.wait_until("Ray has died", lambda: log.read_text().count("starting it again") == number)  # noqa: B023
        version = goes_on(terminal, version)
    assert lock.read_text() == coordinator
    assert terminal.run("stop", RUN).code == 0
    terminal.check_nothing_left()
    finished = terminal.marker(RUN, ".finished")
    assert (finished["reason"], finished["version"] >= version) == ("stopped", True)
    check_ledger(finished)
