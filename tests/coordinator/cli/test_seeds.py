"""`train --seeds`: which seeds, a run for each, what the whole comes to, and how it ends early."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from stagecoach.coordinator.cli.seeds import parse_seeds
from stagecoach.coordinator.run_access import run_processes as module
from stagecoach.coordinator.run_access.run import Run
from stagecoach.coordinator.run_access.run_comparison import result_of
from stagecoach.shared.base.errors import UserError
from tests.support.processes.command_line import CommandLine, Stagecoach, check_refused
from tests.support.runs.ended_runs import copies


def test_seeds_are_a_number_or_a_list() -> None:
    assert parse_seeds("3", 5) == [5, 6, 7]
    assert parse_seeds("1,2, 7", 5) == [1, 2, 7]
    assert parse_seeds("4,", 5) == [4]


@pytest.mark.parametrize("text", ["", "x", "-1", "1,x", "0", "1,1", "1000000000000", "1.5", ","])
def test_parse_seeds_refuses_invalid_seeds(text: str) -> None:
    with pytest.raises(UserError, match="--seeds "):
        parse_seeds(text, 1)


def test_seeds_refuse_conflicting_options(stagecoach: Stagecoach, tmp_path: Path) -> None:
    check_refused(stagecoach("train", "config.yaml", "--parallel", "2"), "--seeds")
    check_refused(stagecoach("train", "config.yaml", "--seeds", "2", "--detach"), "--detach")
    check_refused(stagecoach("train", "config.yaml", "--seeds", "2", "--set", "seed=x"), "seed")
    (tmp_path / "runs" / "x-seed-2").mkdir(parents=True)
    check_refused(
        stagecoach("train", "config.yaml", "--seeds", "2", "--run-id", "x"), "'x-seed-2' exists", "--or-resume"
    )


class Child:
    """A process that stands for a run: it ends with a code, or once it is told to."""

    started: list[list[str]] = []

    def __init__(self, arguments: list[str]) -> None:
        self.started.append(arguments)
        self.told: list[int] = []
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def send_signal(self, number: int) -> None:
        self.told.append(number)
        self.code = 0


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch, ended_run: Run, tmp_path: Path) -> list[Child]:
    """Those that are begun; their runs are copies of one that has ended."""
    begun: list[Child] = []

    def start(arguments: list[str], beside_others: bool) -> Any:
        child = Child(arguments)
        begun.append(child)
        seed = arguments[-1].removeprefix("seed=")
        copies(ended_run, tmp_path / "runs", {f"x-seed-{seed}": {"seed": seed}})
        child.code = {"1": 0, "2": 1, "3": 0}.get(seed)
        return child, None

    monkeypatch.setattr(module, "start_process", start)
    return begun


def test_seeds_start_a_run_each_and_exit_with_worst_code(
    stagecoach: Stagecoach, children: list[Child], ended_run: Run
) -> None:
    done = stagecoach(
        "train", "config.yaml", "--seeds", "1,2,3", "--run-id", "x", "--inline", "--set", "metrics.every=2 updates"
    )
    assert done.code == 1, done
    expected = [
        "train",
        "config.yaml",
        "--set",
        "metrics.every=2 updates",
        "--inline",
        "--run-id",
        "x-seed-2",
        "--set",
        "seed=2",
    ]
    assert Child.started[-2] == expected
    assert [row["run_id"] for row in stagecoach("runs", "--json").json()] == ["x-seed-1", "x-seed-2", "x-seed-3"]
    (row,) = (line for line in done.out.splitlines() if line.startswith("x "))
    assert row.count(f"{result_of(ended_run).last:.4g}") == 6, "mean and IQM, each with its interval"


def test_seeds_pass_on_signal_and_start_no_more(stagecoach: Stagecoach, children: list[Child]) -> None:
    interrupt = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    done = stagecoach("train", "config.yaml", "--seeds", "4,5,6", "--parallel", "2", "--run-id", "x")
    interrupt.join()
    assert done.code == 130
    assert [child.told for child in children] == [[signal.SIGINT], [signal.SIGINT]]
    assert "not begun: x-seed-6" in done.err and "--or-resume" in done.err


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_seeds_train_side_by_side_in_processes_of_their_own(terminal: CommandLine) -> None:
    terminal.write_config()
    done = terminal.run("train", "config.yaml", "--seeds", "1,3", "--parallel", "2", "--run-id", "x", "--inline")
    assert "95 % intervals" in done.ok()
    assert [terminal.handle(f"x-seed-{seed}").config.seed for seed in (1, 3)] == [1, 3]
    for seed in (1, 3):
        terminal.check_ended(f"x-seed-{seed}", "exhausted")
    again = terminal.run("train", "config.yaml", "--seeds", "1,3", "--run-id", "x", "--inline", "--or-resume")
    assert "x-seed-3: 2 of 2" in again.ok()
    bad = terminal.run(
        "train", "config.yaml", "--seeds", "8,", "--parallel", "2", "--run-id", "y", "--set", "environment.id=No-v0"
    )
    assert bad.code == 2 and "No-v0" in bad.out + bad.err
