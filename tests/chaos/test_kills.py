"""One real run that loses all it has, one thing after the other: each part killed, stopped, and short of
files and memory, in a seed's order.

With one worker in lockstep the log is that of a run that nothing happened to, so the weights must be the same.
"""

from __future__ import annotations

import random
import signal
import subprocess
import time
from functools import partial
from typing import Any

import pytest

from tests.support.processes.command_line import DEADLINE_SECONDS, CommandLine, check_ledger
from tests.support.processes.process_faults import AWAY, Fault, Watched, deny_files, deny_memory, go_on, kill, stop
from tests.support.runs import lockstep_run

RUN, UNDISTURBED = "killed", "undisturbed"
ROLES = [(kill, kind) for kind in ("trainer", "worker", "evaluator")]
FAULTS = [*ROLES, *((kill, kind) for kind in ("Redis", "store", "raylet", "coordinator"))]
STOPS = [(stop, kind) for kind in ("trainer", "worker", "evaluator", "Redis", "store", "coordinator")]
SHORT = [
    *((deny_files, kind) for kind in ("trainer", "worker", "evaluator", "Redis", "store", "coordinator")),
    *((deny_memory, kind) for kind in ("trainer", "worker", "evaluator", "Redis", "store")),
]


@pytest.fixture
def terminal(terminal: CommandLine) -> CommandLine:
    (terminal.folder / "slow.py").write_text(lockstep_run.ENVIRONMENT)
    return terminal


def recover(terminal: CommandLine, watched: Watched, fault: Fault) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        try:
            if fault.is_over(watched):
                return
        except AWAY:
            pass
        assert time.monotonic() < deadline, f"{fault.label} ({fault.name}): not well again; {terminal.left()}"
        time.sleep(0.1)


def writes_at_once(watched: Watched) -> bool:
    """From now on its file has what Redis has answered: with `everysec` that comes up to 2 s later on a slow disk, and
    what a kill then takes away is lost, and counted as such."""
    try:
        return bool(watched.client().config_set("appendfsync", "no"))
    except AWAY:
        return False


def suffer(
    terminal: CommandLine, watched: Watched, process: subprocess.Popen[str], faults: list[tuple[Any, str]]
) -> subprocess.Popen[str]:
    """Every fault once, at random times, each until the run is well again; answers the process that has the run."""
    chance = random.Random(7)
    for way, kind in chance.sample(faults, len(faults)):
        time.sleep(chance.uniform(0.0, 1.0))
        there: dict[str, list[tuple[str, int]]] = {}

        def seen(kind: str = kind, there: dict[str, list[tuple[str, int]]] = there) -> bool:
            there.update(watched.processes())
            return kind in there

        terminal.wait_until(f"a process: {kind}", seen)
        name, pid = there[kind][0]
        if (way, kind) == (kill, "Redis"):
            terminal.wait_until("Redis to write at once", partial(writes_at_once, watched))
        fault = way(watched, kind, name, pid)
        if way is not kill:
            time.sleep(chance.uniform(0.5, 2.0) if way is stop else 5.0)
            go_on(fault)
        if (way, kind) == (kill, "coordinator"):
            process.wait()
            terminal.wait_until("all that it had started to end", lambda: not terminal.left())
            process = terminal.start("resume", RUN)
        recover(terminal, watched, fault)
        assert all(line.balances for line in watched.accounting().values()), (fault.label, watched.accounting())
    return process


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(ROLES, marks=pytest.mark.essential, id="each role is killed"),
        pytest.param(FAULTS + STOPS, id="everything is killed, and stopped"),
        pytest.param(SHORT, id="each is short of files and of memory"),
    ],
)
def test_kills_and_stops_leave_weights_equal(terminal: CommandLine, faults: list[tuple[Any, str]]) -> None:
    path = lockstep_run.write_config(terminal, 0.003, stop_at={"updates": 10**6})
    process = terminal.start("train", path, "--run-id", RUN)
    terminal.until(RUN, "training", lambda status: status.version > 1)
    process = suffer(terminal, Watched(terminal, RUN), process, faults)
    process.send_signal(signal.SIGINT)
    done = terminal.ended(process)
    assert done.code == 0, done
    terminal.check_nothing_left()
    finished = terminal.marker(RUN, ".finished")
    check_ledger(finished)
    assert "lost" not in finished["ledger"]["total"]["dropped"]
    verified = terminal.run("checkpoints", "verify", RUN)
    assert verified.code == 0, verified

    goal = {"updates": finished["counters"]["train"]["updates"]}
    calm = terminal.run(
        "train", lockstep_run.write_config(terminal, 0.0, stop_at=goal), "--run-id", UNDISTURBED, "--inline"
    )
    assert calm.code == 0, calm
    assert lockstep_run.final_weights(terminal, RUN) == lockstep_run.final_weights(terminal, UNDISTURBED)
