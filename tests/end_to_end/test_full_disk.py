"""The disk of a run's folder or of its store is full: the run waits by name, ends when asked to, and continues."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.command_line import CommandLine, check_refused
from tests.support.services.own_redis import OwnRedis

RUN = "full"
GRACE_SECONDS = 4
pytestmark = [pytest.mark.timeout(300), pytest.mark.chaos]


class SmallDisk:
    """A file system of 24 MB of a test's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"a small file system needs root: {done.stderr.strip()}")

    def fill(self) -> None:
        """Takes all that is left."""
        with contextlib.suppress(OSError), (self.folder / "ballast").open("ab", buffering=0) as ballast:
            while True:
                ballast.write(bytes(4096))

    def free(self) -> None:
        """Gives it back."""
        (self.folder / "ballast").unlink()

    def close(self) -> None:
        """Takes the file system away."""
        subprocess.run(["umount", "-l", str(self.folder)], check=True)


@pytest.fixture
def disk(terminal: CommandLine) -> Iterator[SmallDisk]:
    made = SmallDisk(terminal.folder / "runs")
    yield made
    terminal.close()
    made.close()


def config(terminal: CommandLine, **sections: Any) -> Path:
    sections |= {"stop_at": {"updates": 10**6}, "checkpoint": {"every": "10 updates"}}
    return terminal.write_config(trainer={"grace_seconds": GRACE_SECONDS}, **sections)


def redis_servers(terminal: CommandLine) -> set[int]:
    return {pid for pid, command in terminal.left().items() if re.match(r"\S*(redis|valkey)-server", command)}


def check_ended_without_a_checkpoint(terminal: CommandLine, process: subprocess.Popen[str], needed: str) -> None:
    """One SIGTERM, after which it has `GRACE_SECONDS`; and nothing but words."""
    process.send_signal(signal.SIGTERM)
    done = terminal.ended(process)
    assert done.code == 130, done
    assert f"a last checkpoint needs {needed}" in done.out, done
    assert f"stagecoach resume {RUN}" in done.out
    assert "Traceback" not in done.out + done.err, done


def check_continues_without_loss(terminal: CommandLine, process: subprocess.Popen[str], version: int) -> None:
    """The pause lasts until Ctrl-C, which ends the run in order."""
    terminal.until_checkpoint(RUN, version)
    process.send_signal(signal.SIGINT)
    terminal.ended(process).ok()
    terminal.check_ended(RUN)


@pytest.mark.ray
def test_full_disk_of_the_run_folder_pauses_the_run(terminal: CommandLine, disk: SmallDisk) -> None:
    process = terminal.start("train", config(terminal), "--run-id", RUN)
    version = terminal.until_checkpoint(RUN, 0)
    disk.fill()
    why = f"its disk is full (No space left on device): make room in the file system of {disk.folder / RUN}"
    terminal.wait_until("the pause to be told", lambda: why in terminal.output(process))
    told = terminal.run("status", RUN).ok()
    assert "paused" in told and why in told.replace("\n", ""), told
    check_refused(terminal.run("stop", RUN), why)
    watching = terminal.start("watch", RUN)
    terminal.wait_until("the pause to be watched", lambda: why in terminal.output(watching))
    disk.free()
    version = terminal.until_checkpoint(RUN, version)
    terminal.wait_until("watching to go on", lambda: "running" in terminal.output(watching))

    disk.fill()
    terminal.until(RUN, "another pause", lambda status: status.state == "paused")
    check_ended_without_a_checkpoint(terminal, process, "Redis, since ")
    terminal.check_nothing_left()
    disk.free()
    check_continues_without_loss(terminal, terminal.start("resume", RUN, "--inline"), version)


def test_redis_that_died_of_a_full_disk_is_restarted(terminal: CommandLine, disk: SmallDisk) -> None:
    process = terminal.start("train", config(terminal), "--run-id", RUN, "--inline")
    version = terminal.until_checkpoint(RUN, 0)
    disk.fill()
    terminal.until(RUN, "the pause", lambda status: status.state == "paused")
    former = redis_servers(terminal)
    os.kill(min(former), signal.SIGKILL)
    terminal.wait_until("another Redis", lambda: bool(redis_servers(terminal) - former))
    disk.free()
    check_continues_without_loss(terminal, process, version)


@pytest.mark.parametrize("which", ["a folder", "the embedded server"])
def test_full_disk_of_the_store_is_named_and_run_can_end(
    which: str, terminal: CommandLine, disk: SmallDisk, tmp_path: Path
) -> None:
    """All files of the run are on that disk, train.csv and logs among them; Redis is not."""
    server = OwnRedis(tmp_path / "own")
    terminal.environ["STAGECOACH_REDIS_PASSWORD"] = server.password
    sections: dict[str, Any] = {"redis": {"url": f"redis://127.0.0.1:{server.port}/0"}}
    place = disk.folder / RUN / "s3"
    if which == "a folder":
        place = disk.folder / "objects"
        place.mkdir()
        sections |= {"store": {"url": f"file://{place}"}, "runs_dir": str(tmp_path / "elsewhere")}
    runs = ["--runs-dir", str(sections.get("runs_dir", "runs"))]
    try:
        process = terminal.start("train", config(terminal, **sections), "--run-id", RUN, "--inline")
        terminal.wait_until("a checkpoint", lambda: "checkpoint  10_" in terminal.output(process))
        disk.fill()
        why = f"its disk is full (No space left on device): make room in the file system of {place}"
        terminal.wait_until("the failure to be told", lambda: why in terminal.output(process))
        check_ended_without_a_checkpoint(terminal, process, "the store: ")
        disk.free()
        process = terminal.start("resume", RUN, "--inline", *runs)
        terminal.wait_until("a checkpoint", lambda: "\ncheckpoint " in terminal.output(process))
        process.send_signal(signal.SIGINT)
        assert "in flight: balances" in terminal.ended(process).ok()
    finally:
        server.kill()
