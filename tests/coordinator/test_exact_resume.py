"""Exact resume by the command line: the whole run is killed or stopped, resumed, and ends with the same weights."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.command_line import CommandLine, check_ledger
from tests.support.checkpoints import upload_in

UPDATES = 150
SECTIONS = {
    "rollout": {"workers": 1, "fragment_steps": 16, "fragments_per_update": 2},
    "algorithm": {"minibatch_size": 64, "epochs": 1},
    "checkpoint": {"every": "7 updates"},
    "archive": "all",
    "stop_at": {"updates": UPDATES},
}


@pytest.fixture
def line(tmp_path: Path) -> Iterator[CommandLine]:
    """The command line in a folder of its own."""
    made = CommandLine(tmp_path)
    made.write_config(**SECTIONS)
    yield made
    made.close()


def final_policy(line: CommandLine, run_id: str) -> str:
    """SHA-256 of the final policy file."""
    finished = line.marker(run_id, ".finished")
    check_ledger(finished)
    assert finished["reason"] == "exhausted" and finished["counters"]["train"]["updates"] == UPDATES
    folder = upload_in(line.store(run_id) / "checkpoints" / finished["final"])
    return hashlib.sha256((folder / "default" / "policy.safetensors").read_bytes()).hexdigest()


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_killed_and_stopped_and_resumed_it_is_the_run_that_was_never_disturbed(line: CommandLine) -> None:
    assert line.run("train", "config.yaml", "--inline", "--run-id", "whole").code == 0
    expected = final_policy(line, "whole")
    endless = "stop_at.updates=1000000"  # or it could be over before somebody looks
    process = line.start("train", "config.yaml", "--inline", "--run-id", "broken", "--set", endless)
    for version in (9, 23):
        line.until("broken", f"version {version}", lambda status, at=version: status.live and status.version >= at)  # type: ignore[misc]
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        line.wait_until("all of it is gone", lambda: not line.left())
        process = line.start("resume", "broken", "--inline")
    line.until("broken", "version 40", lambda status: status.live and status.version >= 40)
    process.send_signal(signal.SIGINT)
    assert line.ended(process).code == 0
    assert line.marker("broken", ".finished")["reason"] == "stopped"
    assert line.run("resume", "broken", "--inline", "--set", f"stop_at.updates={UPDATES}").code == 0
    assert final_policy(line, "broken") == expected
    done = line.json("replay", "broken")
    assert done["equal"] and done["sha256"]["default/policy.safetensors"] == expected
