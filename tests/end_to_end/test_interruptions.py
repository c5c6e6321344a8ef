"""A run that is interrupted: by Ctrl-C and SIGTERM, once and twice, while it starts; by the death of its coordinator or
of a rank (tests/chaos/test_kills.py has the other roles). What is durable stays, and `resume` goes on from there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from stagecoach.coordinator.catalog.status import Status
from stagecoach.coordinator.services import memory_folder
from stagecoach.shared.protocol.shared_memory import OWNER
from tests.support.environments.small import MODULE
from tests.support.processes.command_line import SOURCE, CommandLine, check_ledger, check_refused

RUN = "interrupted"
FOR_EVER = {"updates": 10**6}
AT_HOME = {"PYTHONPATH": f"{SOURCE / 'src'}:{SOURCE}"}
pytestmark = pytest.mark.timeout(300)


def train(terminal: CommandLine, *settings: str) -> subprocess.Popen[str]:
    """A run in the foreground of its own session, until it has a checkpoint of something learned."""
    process = terminal.start("train", terminal.write_config(stop_at=FOR_EVER), "--run-id", RUN, *settings)
    terminal.until_checkpoint(RUN, 0)
    return process


def durable(terminal: CommandLine) -> tuple[int, int]:
    """Policy version and env steps of the checkpoint that the pointer names."""
    latest = terminal.marker(RUN, ".checkpoint")["latest"]
    version, _, steps = latest.removesuffix(".ckpt").partition("_Step-")
    return int(version), int(steps)


@pytest.mark.essential
def test_signal_ends_the_run_with_a_last_checkpoint(terminal: CommandLine) -> None:
    """Ctrl-C, and SIGTERM on the run that is resumed after it."""
    process = train(terminal, "--set", "rollout.workers=2")
    process.send_signal(signal.SIGINT)
    assert f"{RUN}: stopped" in terminal.ended(process).ok()
    first = terminal.check_ended(RUN)

    process = terminal.start("resume", RUN)
    terminal.until(RUN, "more versions", lambda status: status.live and status.version > first["version"])
    process.send_signal(signal.SIGTERM)
    terminal.ended(process).ok()
    second = terminal.check_ended(RUN)
    assert second["version"] > first["version"]
    assert second["counters"]["train"]["env_steps"] > first["counters"]["train"]["env_steps"]


def test_coordinator_kill_ends_all_and_two_signals_end_resume(terminal: CommandLine) -> None:
    process = train(terminal)
    process.kill()
    process.wait()
    terminal.wait_until("Redis, S3 and Ray to end", lambda: not terminal.left())
    version, steps = durable(terminal)
    assert version > 0

    status = terminal.json("status", RUN)
    assert (status["state"], status["live"]) == ("interrupted", False)
    assert "stagecoach resume" in status["reason"]
    kept = terminal.marker(RUN, "training_status.json")["checkpoints"][-1]  # is written after the pointer
    assert (status["version"], status["env_steps"]) == (kept["version"], kept["env_steps"]) <= (version, steps)

    process = terminal.start("resume", RUN)
    terminal.until(RUN, "a version that was not there before", lambda status: status.live and status.version > version)
    seen = [durable(terminal)]
    for _ in range(3):
        terminal.until_checkpoint(RUN, seen[-1][0])
        seen.append(durable(terminal))
    assert seen == sorted(seen)
    assert seen[0] >= (version, steps)

    (trainer,) = [beat.pid for beat in terminal.handle(RUN).status().roles if beat.id == "trainer"]
    os.kill(trainer, signal.SIGSTOP)  # so that the first signal cannot end it
    process.send_signal(signal.SIGINT)
    terminal.wait_until("the first signal to be taken", lambda: "Ctrl-C again" in terminal.output(process))
    reached = terminal.handle(RUN).status().version
    process.send_signal(signal.SIGINT)
    done = terminal.ended(process)
    assert done.code == 130, done
    terminal.check_nothing_left()
    assert not (terminal.store(RUN) / ".finished").exists()
    assert "Traceback" not in done.err

    goal = max(reached, durable(terminal)[0]) + 40
    terminal.run("resume", RUN, "--set", f"stop_at.updates={goal}").ok()
    finished = terminal.check_ended(RUN, "exhausted")
    assert finished["version"] == finished["counters"]["train"]["updates"] == goal
    rows = (terminal.folder / "runs" / RUN / "metrics" / "train.csv").read_text().splitlines()
    assert len(rows) == 1 + goal, "every version has one row, also those that were learned twice"


def in_memory(terminal: CommandLine) -> list[Path]:
    """Folders in shared memory of the runs of this test."""
    found = []
    for folder in memory_folder.ROOT.glob("stagecoach-*"):
        with contextlib.suppress(OSError):  # another test's
            if str(terminal.folder) in (folder / OWNER).read_text():
                found.append(folder)
    return found


def test_shared_memory_holds_nothing_of_a_killed_run(terminal: CommandLine) -> None:
    """After the next start of any run, or the deletion; and a resume learns what was there."""
    bodies = terminal.folder / "runs" / RUN / "redis" / "bodies"
    sections: dict[str, Any] = {
        "environment": {"id": "CartPole-v1", "num_envs": 32},
        "rollout": {"workers": 1, "fragment_steps": 64, "fragments_per_update": 2},
        "algorithm": {"minibatch_size": 1024, "epochs": 1}, "checkpoint": {"every": "50 updates"},
    }  # fmt: skip

    def kill_everything(*arguments: str | Path) -> None:
        process = terminal.start(*arguments)
        terminal.until_checkpoint(RUN, durable(terminal)[0] if bodies.exists() else 0)
        terminal.wait_until("a body in memory", lambda: any(f.glob("worker-0:*") for f in in_memory(terminal)))
        for pid in terminal.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        terminal.check_nothing_left()

    kill_everything("train", terminal.write_config(stop_at=FOR_EVER, **sections), "--run-id", RUN)
    other = terminal.write_config(stop_at={"updates": 1})
    terminal.run("train", other, "--run-id", "other", "--inline").ok()
    assert in_memory(terminal) == []
    assert list(bodies.glob("worker-0:*"))
    goal = f"stop_at.updates={durable(terminal)[0] + 200}"
    terminal.run("resume", RUN, "--set", goal).ok()
    assert in_memory(terminal) == []
    finished = terminal.check_ended(RUN, "exhausted")
    assert not {"lost_body", "lost"} & {*finished["ledger"]["total"]["dropped"]}
    kill_everything("resume", RUN, "--set", "stop_at.updates=1000000")
    terminal.run("delete", RUN, "--yes").ok()
    assert in_memory(terminal) == []


def test_hung_inline_environment_is_named_and_third_signal_exits(terminal: CommandLine) -> None:
    hangs = {"id": f"{MODULE}:Hangs", "kwargs": {"tally": str(terminal.folder / "tally"), "times": 1}}
    path = terminal.write_config(environment=hangs, stop_at=FOR_EVER)
    process = terminal.module("stagecoach", "train", path, "--run-id", RUN, "--inline", environ=AT_HOME)
    terminal.wait_until("the environment to hang", lambda: (terminal.folder / "tally").exists())
    for answer in ("Ctrl-C again", "it does not end: it is at "):
        process.send_signal(signal.SIGINT)
        terminal.wait_until(answer, lambda answer=answer: answer in terminal.output(process))  # type: ignore[misc]
    assert "environments/small.py:" in terminal.output(process) and "in hang" in terminal.output(process)
    process.send_signal(signal.SIGINT)
    assert terminal.ended(process).code == 130
    terminal.wait_until("Redis and S3 to end", lambda: not terminal.left())


@pytest.mark.parametrize(
    ("when", "number"),
    [("its services start", signal.SIGINT), ("its services start", signal.SIGTERM), ("its roles start", signal.SIGINT)],
)
def test_ctrl_c_while_it_starts_leaves_nothing(terminal: CommandLine, when: str, number: signal.Signals) -> None:
    """The folder of a run that was not announced is removed; a later signal ends it like any run."""
    process = terminal.start("train", terminal.write_config(stop_at=FOR_EVER), "--run-id", RUN)
    services = when == "its services start"
    if services:
        terminal.wait_until("a service", lambda: len(terminal.left()) > 1)
    else:
        terminal.wait_until("the run's announcement", lambda: f"run {RUN}; its folder" in terminal.output(process))
    process.send_signal(number)
    done = terminal.ended(process)
    assert "Traceback" not in done.err
    terminal.check_nothing_left()
    assert list(terminal.temporary.glob("sc-*")) == []
    if services and done.code != 0:  # else it began before the signal came
        assert done.code == 130, done
        # while the run is checked, only Ray and the zygote are there
        assert done.err in ("interrupted: what was started is being ended\nInterrupted.\n", "Interrupted.\n")
        assert not (terminal.folder / "runs" / RUN).exists()
    else:
        done.ok()
        assert terminal.marker(RUN, ".finished")["reason"] == "stopped"


@pytest.mark.parametrize("seconds", [0.1, 0.6, 2.0])
def test_sigterm_ends_a_run_in_order_while_ray_is_joined(terminal: CommandLine, seconds: float) -> None:
    """Ray sets handlers of its own while a driver joins, in Python and in native code."""
    process = terminal.start("train", terminal.write_config(stop_at=FOR_EVER), "--run-id", RUN)
    terminal.wait_until("Ray to be joined", lambda: "starting the roles" in terminal.output(process))
    time.sleep(seconds)
    process.send_signal(signal.SIGTERM)
    terminal.ended(process).ok()
    assert terminal.marker(RUN, ".finished")["reason"] == "stopped"
    terminal.check_nothing_left()
    copies = list((terminal.folder / "runs" / RUN / "logs" / "ray").glob("session_*/**/*"))
    assert {path.stat().st_mode & 0o777 for path in copies if path.is_file()} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in copies if path.is_dir()} <= {0o700}


def test_run_with_two_ranks_survives_the_death_of_one(terminal: CommandLine) -> None:
    run = terminal.start("train", terminal.write_config(stop_at=FOR_EVER), "--run-id", RUN, "--set", "trainer.ranks=2")

    def rank(status: Status) -> int | None:
        return next((beat.pid for beat in status.roles if beat.id == "rank-1" and beat.alive), None)

    two = terminal.until(RUN, "two ranks learning", lambda status: status.version > 2 and rank(status) is not None)
    pid = rank(two)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    after = terminal.until(RUN, "another process", lambda status: rank(status) not in (None, pid))
    terminal.until(RUN, "learning again", lambda status: status.version > after.version + 2)
    terminal.run("stop", RUN).ok()
    assert "2 ranks learn together over gloo, in the group of epoch 2" in terminal.ended(run).ok()
    terminal.check_ended(RUN)
    assert "ranks 2" in terminal.run("checkpoints", "show", RUN).ok()


@pytest.mark.parametrize(
    ("fails", "code", "words"),
    [("leave", 2, "Error: os._exit(0) has ended this process"), ("crash", -11, "Fatal Python error: Segmentation f")],
)
def test_environment_that_ends_the_only_process_is_named(
    terminal: CommandLine, fails: str, code: int, words: str
) -> None:
    environment = {"id": f"{MODULE}:Counting", "kwargs": {"fails": fails, "fails_at": 2}}
    config = terminal.write_config(environment=environment, algorithm={"minibatch_size": 8})
    done = terminal.ended(terminal.module("stagecoach", "train", config, "--inline", environ=AT_HOME))
    assert (done.code, words in done.err, "support/environments/small.py" in done.err) == (code, True, True), done


def test_second_command_for_one_run_is_refused(terminal: CommandLine) -> None:
    """Started at once, for a new run and for one that has ended; and on a copy of the folder of one that is at work."""
    config = terminal.write_config(stop_at={"updates": 6})
    for command in (["train", config, "--run-id", RUN], ["resume", RUN, "--set", "stop_at.updates=12"]):
        both = [terminal.start(*command, "--inline") for _ in range(2)]
        done, refused = sorted((terminal.ended(process) for process in both), key=lambda ended: ended.code)
        done.ok()
        check_refused(refused, f"Error: run '{RUN}' ")
        assert "exists in" in refused.err or "is live already" in refused.err
        check_ledger(terminal.marker(RUN, ".finished"))
    process = terminal.start("resume", RUN, "--inline", "--set", "stop_at.updates=1000000")
    before = terminal.until(RUN, "more versions", lambda status: status.live and status.version > 12)
    copies = terminal.folder / "copies"
    shutil.copytree(terminal.folder / "runs" / RUN, copies / RUN)
    refused = terminal.run("resume", RUN, "--inline", "--runs-dir", copies)
    check_refused(refused, f"run '{RUN}' is live already: its coordinator is process {process.pid} on ")
    terminal.until(RUN, "still more versions", lambda status: status.version > before.version)
    process.send_signal(signal.SIGINT)
    terminal.ended(process).ok()
    terminal.check_ended(RUN)
