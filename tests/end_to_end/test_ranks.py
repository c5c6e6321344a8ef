"""Two learner ranks as Ray actors, by the command line: the run goes on when one is killed, and leaves nothing."""

from __future__ import annotations

import os
import signal

import pytest

from coordinator.status import Status
from tests.end_to_end.command_line import CommandLine, check_ledger

RUN = "two-ranks"
pytestmark = pytest.mark.timeout(300)


def rank_pid(status: Status) -> int | None:
    return next((beat.pid for beat in status.roles if beat.id == "rank-1" and beat.alive), None)


def test_a_run_with_two_ranks_survives_the_death_of_one(terminal: CommandLine) -> None:
    config = terminal.write_config(
        stop_at={"updates": 10**6}, rollout={"workers": 1, "fragment_steps": 32, "fragments_per_update": 2}
    )
    run = terminal.start("train", config, "--run-id", RUN, "--set", "trainer.ranks=2")
    before = terminal.until(
        RUN, "two ranks learning", lambda status: status.version > 2 and rank_pid(status) is not None
    )
    pid = rank_pid(before)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    after = terminal.until(RUN, "another process", lambda status: rank_pid(status) not in (None, pid))
    terminal.until(RUN, "learning again", lambda status: status.version > after.version + 2)
    assert terminal.run("stop", RUN).code == 0
    done = terminal.ended(run)
    assert done.code == 0, done
    assert "2 ranks learn together over gloo, in the group of epoch 2" in done.out, done
    finished = terminal.marker(RUN, ".finished")
    assert finished["reason"] == "stopped"
    check_ledger(finished)
    shown = terminal.run("checkpoints", "show", RUN)
    assert "ranks 2" in shown.out, shown
    terminal.check_nothing_left()
