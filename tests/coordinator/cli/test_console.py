"""What people read: text from outside stays as it is, whatever it holds."""

from __future__ import annotations

import dataclasses
import errno
import io
import re
from pathlib import Path

import pytest

from stagecoach.coordinator.catalog.run_files import RunStatus
from stagecoach.coordinator.catalog.run_folder import RunFolder
from stagecoach.coordinator.catalog.status import Status, bottleneck, summarize_fleet
from stagecoach.coordinator.cli.terminal.console import PrintableConsole
from stagecoach.coordinator.cli.terminal.live_view import ledger_line, print_status, print_summary, scores_of_note
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
    print_status(run(tmp_path), status(NASTY), console)
    print_summary(run(tmp_path), Outcome(RunEnd(NASTY), status(NASTY), 1.0), console)
    assert shown(console).count(NASTY) >= 2


def test_run_at_its_bound_has_reached_stop_at(console: PrintableConsole, tmp_path: Path) -> None:
    beat = Beat("trainer", "trainer", "1-0", 0.0, 7, "host", "exhausted", None, 0.0, 0.0, {})
    ended = dataclasses.replace(status("exhausted"), roles=[beat], bottleneck=bottleneck([beat], {}))
    print_status(run(tmp_path), ended, console)
    print_summary(run(tmp_path), Outcome(RunEnd("exhausted"), ended, 1.0), console)
    assert shown(console).count("reached stop_at") == 4  # state, waits for, roles, summary
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


def test_status_of_thousand_workers_shows_those_in_trouble(console: PrintableConsole, tmp_path: Path) -> None:
    gone = dataclasses.replace(fleet_of(1)[1], id="worker-700", age_seconds=77.0, stages={})
    failed = dataclasses.replace(gone, id="worker-800", ended="it raised", failure=FailureKind.OTHER)
    beats = fleet_of(1000, **{"worker-700": gone, "worker-800": failed})
    ledger = {beat.id: LINE for beat in beats[1:]} | {"total": LINE}
    found = dataclasses.replace(status("x"), roles=beats, fleet=summarize_fleet(beats), ledger=ledger)
    print_status(run(tmp_path), found, console)
    text = shown(console)
    assert "fleet: 999 workers, 597,800 env steps/s; 599 on average, 100 at worst (worker-0); oldest heartbeat" in text
    assert "77.0 s (worker-700)" in text and "and 984 workers more: `stagecoach status a --json` has all" in text
    names = set(re.findall(r"worker-\d+", text))
    assert names == {"worker-700", "worker-800", *(f"worker-{index}" for index in range(14))}
    assert len(str(console.file.getvalue()).splitlines()) < 80  # type: ignore[attr-defined]


def test_status_of_small_fleet_shows_all_workers(console: PrintableConsole, tmp_path: Path) -> None:
    assert summarize_fleet(fleet_of(0)) is None and summarize_fleet([]) is None
    beats = fleet_of(3, **{"worker-1": dataclasses.replace(fleet_of(2)[2], stages={"start": 3.0}, progress={})})
    summary = summarize_fleet(beats)
    assert summary is not None and (summary.workers, summary.slowest, summary.mean_steps_per_second) == (
        3,
        "worker-0",
        101,
    )
    assert str(summarize_fleet(beats[2:3])) == "1 worker; oldest heartbeat 0.5 s (worker-1)", "it has not acted yet"
    print_status(run(tmp_path), dataclasses.replace(status("x"), roles=beats, fleet=summary), console)
    assert set(re.findall(r"worker-\d+", shown(console))) == {"worker-0", "worker-1", "worker-2"}
    assert "more: `" not in shown(console)


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (500.0, "500"), (0.91234, "0.9123"), (-157.25, "-157.2"), (12345.6, "12,345.6")]
)
def test_scores_keep_four_digits(value: float | None, text: str) -> None:
    assert figure(value) == text


def test_summary_shows_confirmed_best_and_last_score() -> None:
    held, poor = (
        {"mean_return": mean, "std_return": deviation, "episodes": 20, "checkpoint": name}
        for mean, deviation, name in ((481.0, 9.0, "2_Step-64.ckpt"), (166.0, 3.0, "3_Step-96.ckpt"))
    )
    training = "training return", "150.5, mean of the last training episodes"
    ended = dataclasses.replace(
        status("x"), metrics={"rollout/ep_rew_mean": 150.5}, latest="3_Step-96.ckpt", best="2_Step-64.ckpt",
        evaluation=poor, best_evaluation=held,
    )  # fmt: skip
    best = "best", "481 in a second evaluation (2_Step-64.ckpt)"
    assert list(scores_of_note(ended)) == [
        training,
        ("last evaluation", "166 ± 3 over 20 episodes (3_Step-96.ckpt)"),
        best,
    ]
    ranked = dataclasses.replace(ended, best_evaluation=held | {"ranking": 40.0, "ranked_by": "rating of cat"})
    assert list(scores_of_note(ranked))[2][1].startswith("rating of cat 40; 481 in a second evaluation")
    first = dataclasses.replace(ended, best="0_Step-0.ckpt")
    assert list(scores_of_note(first))[2][1] == "481 in a second evaluation (0_Step-0.ckpt, before any training)"
    *_, last = scores_of_note(dataclasses.replace(ended, evaluation=None))
    why = "3_Step-96.ckpt was not evaluated before the run ended"
    assert last == ("not evaluated", f"{why}: stagecoach evaluate a/3_Step-96.ckpt")


@pytest.mark.parametrize("elsewhere", [True, False])
def test_summary_says_how_to_use_the_best_policy(
    console: PrintableConsole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / ("other" if elsewhere else "runs")
    made = Run(RunFolder("a", folder / "a"), minimal_config(runs_dir=str(folder)))
    print_status(made, dataclasses.replace(status("x"), best="2_Step-64.ckpt"), console)
    named, loaded = (folder / "a", folder / "a") if elsewhere else ("a", "runs/a")
    assert f'stagecoach evaluate {named} │ │ load_policy("{loaded}")' in shown(console)
    assert f"best policy 2_Step-64.ckpt in {loaded}/s3/stagecoach/a/checkpoints/" in shown(console)


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
        (
            OSError(errno.EMFILE, "Too many open files"),
            FailureKind.RESOURCES,
            "failed: OSError: [Errno 24] Too many open files",
        ),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
            FailureKind.RESOURCES,
            "failed: RuntimeError: DefaultCPUAllocator: can't allocate memory",
        ),
    ],
)
def test_role_failure_is_shown_without_rays_frame(raised: Exception, kind: FailureKind, reason: str) -> None:
    assert RunEnd.failed(Failure.of(raised)) == RunEnd(reason, kind)
