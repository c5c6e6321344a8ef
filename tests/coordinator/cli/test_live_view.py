"""The live view: whatever fails while it shows a run, the run continues."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stagecoach.coordinator.cli.terminal import live_view
from stagecoach.coordinator.cli.terminal.console import PrintableConsole
from stagecoach.coordinator.cli.terminal.live_view import LiveView
from stagecoach.coordinator.run_access.run import Run


def view_of(error: BaseException, screen: io.StringIO, supervises: bool = True, terminal: bool = False) -> LiveView:
    def failing(*_: Any, **__: Any) -> None:
        raise error

    run = SimpleNamespace(run_id="a", config=None, status=failing, events=failing, recent=failing)
    console = PrintableConsole(file=screen, force_terminal=terminal, width=200)
    return LiveView(cast(Run, run), console, "0-0", supervises)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_view, "_REFRESH_SECONDS", 0.0)


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), ValueError("bad"), RecursionError()])
def test_live_view_reports_a_failure_once_and_goes_on(error: Exception, terminal: bool) -> None:
    screen, turns = io.StringIO(), iter([False] * 5 + [True])
    view_of(error, screen, terminal=terminal).show(lambda: next(turns))
    assert next(turns, None) is None
    assert screen.getvalue().count("the run continues, and cannot be shown for now") == 1


def test_unread_output_ends_only_a_command_that_watches() -> None:
    turns = iter([False] * 5 + [True])
    view_of(SystemExit(1), io.StringIO()).show(lambda: next(turns))
    with pytest.raises(SystemExit):
        view_of(SystemExit(1), io.StringIO(), supervises=False).show(lambda: False)
