"""The live view of a run in the terminal, and the summary at its end; plain lines where it is no terminal."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import redis
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from coordinator.cli_options import figure
from coordinator.coordinator import Outcome
from coordinator.profiles import in_one_line
from coordinator.room import Room
from coordinator.run import Run
from coordinator.status import Status
from shared.config import Config
from shared.errors import StagecoachError
from shared.events import Event
from shared.failure import reason_in_words
from shared.foreign import unnamed
from shared.printable import counted

_REFRESH_SECONDS = 0.25
_PLAIN_SECONDS = 5.0
_EVENTS_SHOWN = 8


class LiveView:
    """Shows one run until `ended` says so, with its events after an id, or with the newest few and those that come."""

    def __init__(
        self,
        run: Run,
        console: Console,
        after: str | int = "0-0",
        on_interrupt: str = "Ctrl-C ends it with a last checkpoint",
    ) -> None:
        self._run = run
        self._on_interrupt = on_interrupt
        self._console = console
        self._events: deque[Event] = deque(maxlen=_EVENTS_SHOWN)
        self._after = after
        self.status: Status | None = None
        """As it was seen last."""
        self._started = time.monotonic()

    def show(self, ended: Callable[[], bool]) -> None:
        """Redraws (or prints plain lines) until the run has ended."""
        if not self._console.is_terminal:
            self._show_plain(ended)
            return
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            while not ended():
                self._look()
                live.update(self._panel(), refresh=True)
                time.sleep(_REFRESH_SECONDS)

    def _show_plain(self, ended: Callable[[], bool]) -> None:
        printed = 0.0
        while not ended():
            self._print(self._look())
            if self.status is not None and time.monotonic() - printed >= _PLAIN_SECONDS:
                printed = time.monotonic()
                self._console.print(one_line(self.status), highlight=False, soft_wrap=True)
            time.sleep(_REFRESH_SECONDS)
        with contextlib.suppress(StagecoachError, redis.RedisError):
            self._print(self._new_events())  # what came after the last look

    def _print(self, events: Iterable[Event]) -> None:
        for event in events:
            self._console.print(f"{event.kind:<11} {event.text}", highlight=False, soft_wrap=True)

    def _look(self) -> list[Event]:
        """Takes in the newest status and events; a run that is just starting or ending has none."""
        try:
            self.status = self._run.status(books=False)
            new = self._new_events() if self.status.state != "paused" else []
        except (StagecoachError, redis.RedisError):
            return []
        if new:
            self._after = new[-1].id
            self._events.extend(new)
        return new

    def _new_events(self) -> list[Event]:
        if isinstance(self._after, int):
            self._after = self._run.recent(self._after)
        return self._run.events(self._after)

    def _panel(self) -> Panel:
        title = Text(self._run.run_id, style="bold")
        if self.status is None:
            return Panel(Text("starting …"), title=title)
        parts: list[Any] = [_progress(self.status, self._run.config), figures_table(self.status)]
        parts.append(Text(f"waits for: {self.status.bottleneck}", style="dim"))
        parts += [Text(f"  {event.kind:<11} {event.text}", overflow="ellipsis", no_wrap=True) for event in self._events]
        seconds = time.monotonic() - self._started
        return Panel(Group(*parts), title=title, subtitle=f"{seconds:.0f} s · {self._on_interrupt}")


def _progress(status: Status, config: Config) -> Any:
    bound, done, unit = _bound(status, config)
    if bound is None:
        return Text(f"{done} {unit}")
    grid = Table.grid(padding=(0, 1))
    share = min(1.0, done / bound)
    grid.add_row(ProgressBar(total=1.0, completed=share, width=40), f"{done:,} of {bound:,} {unit}")
    return grid


def _bound(status: Status, config: Config) -> tuple[int | None, int, str]:
    stop = config.stop_at
    for bound, done, unit in (
        (stop.env_steps, status.env_steps, "env steps"),
        (stop.updates, status.updates, "updates"),
        (stop.episodes, status.episodes, "episodes"),
    ):
        if bound is not None:
            return bound, done, unit
    return None, status.env_steps, "env steps"


def figures_table(status: Status) -> Table:
    signals = status.signals
    alive = sum(1 for beat in status.roles if beat.role == "worker" and beat.alive)
    evaluation = status.evaluation
    table = Table.grid(padding=(0, 3))
    told = status.reason and status.state != "paused"  # its reason is what it waits for, which has a line of its own
    state = f"{status.state}: {reason_in_words(status.reason)}" if told else status.state
    auto = status.scaling.get("mode") == "auto"
    bounds = f" (auto, {status.scaling['min']} to {status.scaling['max'] or 'what fits'})" if auto else ""
    workers = f"{alive} of {status.desired_workers}{bounds}" if status.live else "–"
    table.add_row("state", state, "workers", workers)
    table.add_row("speed", f"{signals.get('time/fps') or 0:,.0f} env steps/s", "policy version", str(status.version))
    table.add_row(
        "return", figure(signals.get("rollout/ep_rew_mean")), "policy lag", figure(signals.get("policy/lag_mean"))
    )
    score = f"{figure(evaluation['mean_return'])} ({evaluation['checkpoint']})" if evaluation else "–"
    table.add_row("evaluated", score, "checkpoint", status.latest or "–")
    return table


def one_line(status: Status) -> str:
    if status.state == "paused":
        return f"{status.state:<11} {status.reason}"
    signals = status.signals
    score = f" · evaluated {figure(status.evaluation['mean_return'])}" if status.evaluation else ""
    return (
        f"{status.state:<11} {status.env_steps:,} env steps · {signals.get('time/fps') or 0:,.0f}/s · "
        f"return {figure(signals.get('rollout/ep_rew_mean'))} · version {status.version} · "
        f"lag {figure(signals.get('policy/lag_mean'))}{score} · waits for: {status.bottleneck}"
    )


def print_summary(run: Run, outcome: Outcome, console: Console) -> None:
    """The best checkpoint and the last one, steps, time, where the checkpoints are, the ledger."""
    status = outcome.status
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")  # a path that is cut cannot be copied
    table.add_row("run", f"{run.run_id}: {reason_in_words(outcome.reason.splitlines()[0])}")
    with contextlib.suppress(StagecoachError):  # a summary without a score is better than none
        for title, text in scores_of_note(run.checkpoints(), run.run_id):
            table.add_row(title, text)
    numbers = ((status.env_steps, "env step"), (status.updates, "update"), (status.episodes, "episode"))
    table.add_row("trained", ", ".join(counted(number, noun) for number, noun in numbers))
    table.add_row("time", f"{outcome.seconds:.1f} s, start and end of all services included")
    table.add_row(
        "checkpoints", f"latest {status.latest or '–'}, best {status.best or '–'}, final {status.final or '–'}"
    )
    table.add_row("store", str(run.store_location))
    if outcome.reason == "abandoned":
        table.add_row("continue", f"stagecoach resume {run.run_id}")
    total = status.ledger.get("total")
    if total:
        table.add_row("ledger", ledger_line(total))
    console.print(Panel(table, title="summary", expand=False))


def scores_of_note(entries: Sequence[dict[str, Any]], run_id: str) -> Iterator[tuple[str, str]]:
    """Rows for the summary: the best checkpoint with the score that confirmed it, and the last one with its own.

    A run that is stopped does not wait for its evaluator, so the last one may have no score.
    """
    for title, mark, said in (
        ("result", "best", "the best, by its second evaluation"),
        ("last", "latest", "the last"),
    ):
        for entry in entries:
            if mark in entry["marks"] and (scores := entry["evaluation"]):
                counts = (scores.get("confirmation") or scores) if mark == "best" else scores
                yield title, f"{score_text(counts)}, {entry['name']} ({said})"
            elif mark in entry["marks"] and mark == "latest":
                hint = f"`stagecoach evaluate {run_id}/{entry['name']}` plays it"
                yield title, f"{entry['name']} was not evaluated before the run ended; {hint}"


def score_text(scores: dict[str, Any]) -> str:
    """One evaluation, for people."""
    episodes = counted(scores.get("episodes"), "episode")
    return f"{figure(scores['mean_return'])} ± {figure(scores.get('std_return'))} over {episodes}"


def ledger_line(line: dict[str, Any]) -> str:
    """One line of the books in words."""
    dropped = sum(count["transitions"] for count in line["dropped"].values())
    reasons = ", ".join(f"{reason} {count['transitions']:,}" for reason, count in line["dropped"].items())
    balance = "balances" if line["balances"] else "DOES NOT BALANCE"
    return (
        f"{line['produced']['transitions']:,} produced = {line['consumed']['transitions']:,} consumed + "
        f"{dropped:,} dropped{f' ({reasons})' if reasons else ''} + "
        f"{line['in_flight']['transitions']:,} in flight: {balance}"
    )


def print_status(status: Status, console: Console) -> None:
    """Everything `status` knows, for people."""
    console.print(Panel(figures_table(status), title=Text(status.run_id, style="bold"), expand=False))
    console.print(f"waits for: {status.bottleneck}")
    roles = Table("role", "state", "waits for", "for", "pid", "host", "address", title="roles", title_justify="left")
    for beat in status.roles:
        state = (f"failed: {beat.ended}" if beat.failure else reason_in_words(beat.ended or "")) or (
            "alive" if beat.alive else f"silent for {beat.age_seconds:.0f} s"
        )
        name = beat.id if beat.id.startswith(beat.role) else f"{beat.role} {beat.id}"
        seconds = f"{beat.waiting_seconds:.1f} of {beat.deadline_seconds:,.0f} s" if beat.waiting_for else ""
        roles.add_row(name, state, beat.waiting_for or "", seconds, str(beat.pid), beat.host, beat.address)
    if status.roles:
        console.print(roles)
    for beat in status.roles:
        if line := in_one_line(beat.stages):
            console.print(f"{beat.id}: {line}", highlight=False, soft_wrap=True)
    if status.scaling.get("room"):
        console.print(f"room for {Room(**status.scaling['room'])}", highlight=False, soft_wrap=True)
    books = Table("worker", "env steps", title="ledger", title_justify="left")
    for worker, line in status.ledger.items():
        books.add_row(worker, ledger_line(line))
    if status.ledger:
        console.print(books)
    if status.store.get("error"):
        seconds = max(0.0, time.time() - status.store.get("since", time.time()))
        tries = f"{counted(status.store.get('attempts', 0), 'attempt')} in {seconds:.0f} s failed"
        console.print(f"store: {status.store['error']} ({tries}; training goes on until the log is full)")
    if failed := status.store.get("export"):
        console.print(f"export: {failed['checkpoint']} could not be exported: {failed['error']}", soft_wrap=True)
    if more := unnamed():
        console.print(f"left out as malformed in Redis: {more:,} more beside those that are named above")
