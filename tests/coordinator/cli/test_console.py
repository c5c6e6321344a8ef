"""What people read: text from outside stays as it is, whatever it holds."""

from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path
from typing import Any

import pytest

from stagecoach.coordinator.catalog.run_files import RunStatus
from stagecoach.coordinator.catalog.run_folder import RunFolder
from stagecoach.coordinator.catalog.status import Status, bottleneck, summarize_fleet
from stagecoach.coordinator.cli.terminal.console import PrintableConsole
from stagecoach.coordinator.cli.terminal.live_view import ledger_line, print_status, print_summary, scores_of_note
from stagecoach.coordinator.fleet.managed_actor import cause
from stagecoach.coordinator.lifecycle.supervisor import Outcome
from stagecoach.coordinator.run_access.run import Run
from stagecoach.shared.base.errors import DropReason, EnvironmentFailure, EnvironmentUnusable, StoreError
from stagecoach.shared.base.failure import Failure, FailureKind, RunEnd
from stagecoach.shared.base.printable import figure
from stagecoach.shared.protocol.heartbeat import Beat
from stagecoach.shared.protocol.ledger import Count, LedgerLine
from tests.conftest import minimal_config

LINE = LedgerLine(Count(3, 30), Count(1, 10), {DropReason.STALE: Count(1, 10)}, Count(0, 0)).as_dict()
NASTY = "failed: closing [/red] tag in obs[key] and [bold]"


def status(reason: str) -> Status:
    """An ended run's."""
    return Status("a", RunStatus.FINISHED, reason, False, 3, 64, 3, 2, bottleneck="nobody")


def run(tmp_path: Path) -> Run:
    return Run(RunFolder("a", tmp_path), minimal_config(runs_dir=str(tmp_path)))


def shown(console: PrintableConsole) -> str:
    """Everything printed, on one line."""
    assert isinstance(console.file, io.StringIO)
    return " ".join(console.file.getvalue().split())


@pytest.fixture
def console() -> PrintableConsole:
    """As the command line makes it, but wide and into memory."""
    return PrintableConsole(file=io.StringIO(), width=300)


def test_brackets_in_a_reason_are_text(console: PrintableConsole, tmp_path: Path) -> None:
    print_status(status(NASTY), console)
    print_summary(run(tmp_path), Outcome(RunEnd(NASTY), status(NASTY), 1.0), console)
    assert shown(console).count(NASTY) >= 2


def test_run_at_its_bound_is_completed(console: PrintableConsole, tmp_path: Path) -> None:
    beat = Beat("trainer", "trainer", "1-0", 0.0, 7, "host", "exhausted", None, 0.0, 0.0, {})
    ended = dataclasses.replace(status("exhausted"), roles=[beat], bottleneck=bottleneck([beat], {}))
    print_status(ended, console)
    print_summary(run(tmp_path), Outcome(RunEnd("exhausted"), ended, 1.0), console)
    assert shown(console).count("completed, it has reached stop_at") == 4  # state, waits for, roles, summary
    assert "exhausted" not in shown(console) and ended.as_dict()["reason"] == "exhausted"


def fleet_of(count: int, **changed: Beat) -> list[Beat]:
    """A trainer and workers that have acted for 10 s each, number i 100 + i steps a second."""
    plain = Beat("worker", "", "1-0", 0.5, 7, "host", None, None, 0.0, 0.0, {})
    workers = [
        dataclasses.replace(
            plain, id=f"worker-{index}", progress={"transitions": 10 * (100 + index)},
            stages={"start": 90.0, "act": 4.0, "wait(credit)": 6.0},
        )
        for index in range(count)
    ]  # fmt: skip
    return [dataclasses.replace(plain, role="trainer", id="trainer"), *(changed.get(each.id, each) for each in workers)]


def test_status_of_thousand_workers_shows_those_in_trouble(console: PrintableConsole) -> None:
    gone = dataclasses.replace(fleet_of(1)[1], id="worker-700", age_seconds=77.0, stages={})
    failed = dataclasses.replace(gone, id="worker-800", ended="it raised", failure=FailureKind.OTHER)
    beats = fleet_of(1000, **{"worker-700": gone, "worker-800": failed})
    ledger = {beat.id: LINE for beat in beats[1:]} | {"total": LINE}
    print_status(dataclasses.replace(status("x"), roles=beats, fleet=summarize_fleet(beats), ledger=ledger), console)
    text = shown(console)
    assert "fleet: 999 workers, 597,800 env steps/s; 599 on average, 100 at worst (worker-0); oldest heartbeat" in text
    assert "77.0 s (worker-700)" in text and "and 984 workers more: `stagecoach status a --json` has all" in text
    names = set(re.findall(r"worker-\d+", text))
    assert names == {"worker-700", "worker-800", *(f"worker-{index}" for index in range(14))}
    assert len(str(console.file.getvalue()).splitlines()) < 80  # type: ignore[attr-defined]


def test_status_of_small_fleet_shows_all_workers(console: PrintableConsole) -> None:
    assert summarize_fleet(fleet_of(0)) is None and summarize_fleet([]) is None
    beats = fleet_of(3, **{"worker-1": dataclasses.replace(fleet_of(2)[2], stages={"start": 3.0}, progress={})})
    summary = summarize_fleet(beats)
    assert summary is not None and (summary.workers, summary.slowest, summary.mean_steps_per_second) == (
        3,
        "worker-0",
        101,
    )
    assert str(summarize_fleet(beats[2:3])) == "1 worker; oldest heartbeat 0.5 s (worker-1)", "it has not acted yet"
    print_status(dataclasses.replace(status("x"), roles=beats, fleet=summary), console)
    assert set(re.findall(r"worker-\d+", shown(console))) == {"worker-0", "worker-1", "worker-2"}
    assert "more: `" not in shown(console)


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (500.0, "500"), (0.91234, "0.9123"), (-157.25, "-157.2"), (12345.6, "12,345.6")]
)
def test_scores_keep_four_digits(value: float | None, text: str) -> None:
    assert figure(value) == text


def test_summary_shows_confirmed_best_and_last_score() -> None:
    lucky, held, poor = (
        {"mean_return": mean, "std_return": deviation, "episodes": 20}
        for mean, deviation in ((500.0, 0.0), (481.0, 9.0), (166.0, 3.0))
    )
    entries: list[dict[str, Any]] = [
        {"name": "2_Step-64.ckpt", "marks": ["best"], "evaluation": lucky | {"confirmation": held}},
        {"name": "3_Step-96.ckpt", "marks": ["latest", "final"], "evaluation": poor},
    ]
    assert list(scores_of_note(entries, "a")) == [
        ("result", "481 ± 9 over 20 episodes, 2_Step-64.ckpt (the best, by its second evaluation)"),
        ("last", "166 ± 3 over 20 episodes, 3_Step-96.ckpt (the last)"),
    ]
    entries[1]["evaluation"] = poor | {"ranking": 40.0}
    [_, last] = scores_of_note(entries, "a")
    assert last[1].startswith("ranked by 40; all agents together 166 ± 3 over 20 episodes"), "checkpoint.best_by"
    entries[1]["evaluation"] = None
    [_, last] = scores_of_note(entries, "a")
    hint = "`stagecoach evaluate a/3_Step-96.ckpt` plays it"
    assert last == ("last", f"3_Step-96.ckpt was not evaluated before the run ended; {hint}")


def test_accounting_that_do_not_balance_say_so() -> None:
    told = "30 produced = 10 consumed + 10 dropped (stale 10) + 0 in flight: DOES NOT BALANCE"
    assert ledger_line(LINE) == told


@pytest.mark.parametrize(
    ("raised", "kind", "reason"),
    [
        (StoreError("no room"), FailureKind.OTHER, "failed: no room"),
        (EnvironmentFailure("stuck"), FailureKind.ENVIRONMENT, "failed: environment: stuck"),
        (EnvironmentFailure("stuck\nTraceback\n  odd"), FailureKind.ENVIRONMENT, "failed: environment: stuck"),
        (EnvironmentUnusable("no mesh"), FailureKind.ENVIRONMENT, "failed: environment: no mesh"),
        (ValueError("environment: odd\nand long"), FailureKind.OTHER, "failed: ValueError: environment: odd"),
        (AssertionError(), FailureKind.OTHER, "failed: AssertionError"),
    ],
)
def test_role_failure_is_shown_without_rays_frame(raised: Exception, kind: FailureKind, reason: str) -> None:
    error = RuntimeError("Ray's long text")
    error.cause = raised  # type: ignore[attr-defined]
    assert RunEnd.failed(Failure.of(cause(error))) == RunEnd(reason, kind)
