"""What people read: text from outside stays as it is, whatever it holds."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest

from coordinator.catalog.run_files import RunStatus
from coordinator.catalog.run_folder import RunFolder
from coordinator.catalog.status import Status, bottleneck
from coordinator.cli.live_view import ledger_line, print_status, print_summary, scores_of_note
from coordinator.cli.options import PrintableConsole, figure
from coordinator.fleet.managed_actor import cause
from coordinator.lifecycle.supervisor import Outcome
from coordinator.run import Run
from shared.errors import DropReason, EnvironmentFailure, EnvironmentUnusable, StoreError
from shared.protocol.heartbeat import Beat
from shared.protocol.ledger import Count, LedgerLine
from shared.runtime.failure import Failure, FailureKind, RunEnd
from tests.conftest import minimal_config

NASTY = "failed: closing [/red] tag in obs[key] and [bold]"


def status(reason: str) -> Status:
    """An ended run's."""
    return Status("a", RunStatus.FINISHED, reason, False, 3, 64, 3, 2, None, "nobody")


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


def test_a_run_that_has_reached_its_bound_is_completed(console: PrintableConsole, tmp_path: Path) -> None:
    beat = Beat("trainer", "trainer", "1-0", 0.0, 7, "host", "exhausted", None, 0.0, 0.0, {})
    ended = dataclasses.replace(status("exhausted"), roles=[beat], bottleneck=bottleneck([beat], {}))
    print_status(ended, console)
    print_summary(run(tmp_path), Outcome(RunEnd("exhausted"), ended, 1.0), console)
    assert shown(console).count("completed, it has reached stop_at") == 4  # state, waits for, roles, summary
    assert "exhausted" not in shown(console) and ended.as_dict()["reason"] == "exhausted"


def test_an_export_that_failed_is_told(console: PrintableConsole) -> None:
    failed = {"checkpoint": "2_Step-64.ckpt", "error": "default: no [such] operator"}
    print_status(dataclasses.replace(status("stopped"), store={"durable": "3_Step-96.ckpt", "export": failed}), console)
    assert "export: 2_Step-64.ckpt could not be exported: default: no [such] operator" in shown(console)


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (500.0, "500"), (0.91234, "0.9123"), (-157.25, "-157.2"), (12345.6, "12,345.6")]
)
def test_scores_keep_four_digits(value: float | None, text: str) -> None:
    assert figure(value) == text


def test_the_result_is_the_best_checkpoint_with_its_confirmed_score_and_the_last_stands_beside_it() -> None:
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
    entries[1]["evaluation"] = None
    [_, last] = scores_of_note(entries, "a")
    hint = "`stagecoach evaluate a/3_Step-96.ckpt` plays it"
    assert last == ("last", f"3_Step-96.ckpt was not evaluated before the run ended; {hint}")


def test_accounting_that_do_not_balance_say_so() -> None:
    line = LedgerLine(Count(3, 30), Count(1, 10), {DropReason.STALE: Count(1, 10)}, Count(0, 0))
    told = "30 produced = 10 consumed + 10 dropped (stale 10) + 0 in flight: DOES NOT BALANCE"
    assert ledger_line(line.as_dict()) == told


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
def test_what_a_role_raised_is_told_without_rays_frame(raised: Exception, kind: FailureKind, reason: str) -> None:
    error = RuntimeError("Ray's long text")
    error.cause = raised  # type: ignore[attr-defined]
    assert RunEnd.failed(Failure.of(cause(error))) == RunEnd(reason, kind)
