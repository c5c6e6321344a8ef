"""Live view of a run in the terminal (plain lines elsewhere), and the summary at its end."""

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import redis
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from stagecoach.coordinator.catalog.run_files import RunStatus
from stagecoach.coordinator.catalog.run_metrics import ratings_in
from stagecoach.coordinator.catalog.status import Status, acting_speed
from stagecoach.coordinator.cli.terminal.console import PrintableConsole
from stagecoach.coordinator.cli.terminal.options import RUNS
from stagecoach.coordinator.lifecycle.supervisor import Outcome
from stagecoach.coordinator.run_access.run import Run
from stagecoach.coordinator.run_access.run_comparison import training_time
from stagecoach.shared.base import world
from stagecoach.shared.base.errors import StagecoachError, headline
from stagecoach.shared.base.failure import EndReason, reason_in_words
from stagecoach.shared.base.printable import counted, each_in_words, figure, score_in_words, success_in_words, unnamed
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.checkpoint_name import checkpoint_env_steps
from stagecoach.shared.protocol.events import Event, ranking
from stagecoach.shared.protocol.heartbeat import Beat
from stagecoach.shared.storage.checkpoint_store import CHECKPOINTS

_LOGGER = logging.getLogger("stagecoach.coordinator")
_REFRESH_SECONDS = 0.25
_PLAIN_SECONDS = 5.0
_EVENTS_SHOWN = 8
_WORKERS_SHOWN, _STAGES_SHOWN = 16, 6
_CONCEPTS = "docs/concepts/index.md"


class LiveView:
    """Shows one run with its events after an id, or with the newest few."""

    def __init__(self, run: Run, console: PrintableConsole, after: str | int, supervises: bool = True) -> None:
        self._run, self._console, self._after, self._supervises = run, console, after, supervises
        self._events: deque[Event] = deque(maxlen=_EVENTS_SHOWN)
        self.status: Status | None = None
        self._failed = False
        self._started = world.monotonic()

    def show(self, ended: Callable[[], bool]) -> None:
        if not self._console.is_terminal:
            self._show_plain(ended)
            return
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            while not ended():
                with self._continuing():
                    self._poll()
                    live.update(self.panel(), refresh=True)
                world.sleep(_REFRESH_SECONDS)

    def _show_plain(self, ended: Callable[[], bool]) -> None:
        printed, line = 0.0, ""
        while not ended():
            with self._continuing():
                self._console.text(*map(_event_line, self._poll()))
                if self.status is not None and world.monotonic() - printed >= _PLAIN_SECONDS:
                    printed, before, line = world.monotonic(), line, one_line(self.status)
                    if line != before:  # skips repeated lines of a run that ends or waits
                        self._console.text(line)
            world.sleep(_REFRESH_SECONDS)
        with self._continuing(), contextlib.suppress(StagecoachError, redis.RedisError):
            self._console.text(*map(_event_line, self._new_events()))  # since the last poll

    @contextlib.contextmanager
    def _continuing(self) -> Iterator[None]:
        """Reports the first error of the view, which must not end the run. Rich raises `SystemExit` if nobody reads its
        output, which ends only `watch`."""
        try:
            yield
        except (Exception, SystemExit) as error:
            if isinstance(error, SystemExit) and not self._supervises:
                raise
            if not self._failed:
                self._failed = True
                _LOGGER.exception("the live view")
                with contextlib.suppress(Exception):
                    self._console.text(f"the run continues, and cannot be shown for now: {headline(error)}")

    def _poll(self) -> list[Event]:
        """Fetches status and new events; a run that is starting or ending has none."""
        new: list[Event] = []
        with contextlib.suppress(StagecoachError, redis.RedisError):
            self.status = self._run.status(accounting=False)
            new = self._new_events() if self.status.state is not RunStatus.PAUSED else []
        if new:
            self._after = new[-1].id
            self._events.extend(new)
        return new

    def _new_events(self) -> list[Event]:
        if isinstance(self._after, int):
            self._after = self._run.recent(self._after)
        return self._run.events(self._after)

    def panel(self) -> Panel:
        title = Text(self._run.run_id, style="bold")
        if self.status is None:
            return Panel(Text("starting …"), title=title)
        waits = Text(_machinery(self.status), style="dim")
        events = [Text(f"  {_event_line(event)}", overflow="ellipsis", no_wrap=True) for event in self._events]
        parts = (_progress(self.status, self._run.config), metrics_table(self.status), waits, *events)
        seconds = world.monotonic() - self._started
        hint = "Ctrl-C ends it with a last checkpoint" if self._supervises else "Ctrl-C ends the watching, not the run"
        return Panel(Group(*parts), title=title, subtitle=f"{seconds:.0f} s · {hint}")


def _event_line(event: Event) -> str:
    return f"{event.kind:<11} {event.text}"


def _progress(status: Status, config: Config) -> Table | Text:
    for unit in ("env_steps", "updates", "episodes"):
        bound, done = getattr(config.stop_at, unit), getattr(status, unit)
        if bound is not None:
            grid, bar = Table.grid(padding=(0, 1)), ProgressBar(total=1.0, completed=min(1.0, done / bound), width=40)
            grid.add_row(bar, f"{done:,} of {bound:,} {unit.replace('_', ' ')}")
            return grid
    return Text(f"{status.env_steps} env steps")


_LESSON, _EACH = "curriculum/lesson/", "rollout/ep_rew_mean/"


def metrics_table(status: Status) -> Table:
    """State, returns, steps and speed; ratings and lessons where there are any."""
    metrics = status.metrics
    table = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2))
    told = status.reason and status.state is not RunStatus.PAUSED  # that reason has a line of its own
    table.add_row("state", f"{status.state}: {reason_in_words(status.reason)}" if told else status.state)
    table.add_row("training return", _returns(metrics))
    table.add_row("last evaluation", _evaluated(status))
    table.add_row("best", _best(status))
    speed = f"{metrics.get('time/fps') or 0:,.0f} env steps/s"
    where = " at its newest checkpoint" if status.state is RunStatus.INTERRUPTED and not status.live else ""
    table.add_row("trained", f"{counted(status.env_steps, 'env step')}{where}, {speed}")
    for policy_id, rating in ratings_in(metrics).items():
        elo, rate = (metrics.get(f"league/{name}/{policy_id}") for name in ("elo", "win_rate"))
        table.add_row("rating", f"{policy_id} {figure(rating)}, Elo {figure(elo)}, {rate or 0:.0%} won")
    for entry in sorted(name.removeprefix(_LESSON) for name in metrics if name.startswith(_LESSON)):
        until = metrics.get(f"curriculum/until/{entry}")
        table.add_row("lesson", f"{entry} {figure(metrics[_LESSON + entry])}, measured {figure(until)}")
    return table


def _machinery(status: Status) -> str:
    """Workers, policy version and lag, newest checkpoint, and the party that everyone waits for."""
    alive = sum(1 for beat in status.roles if beat.role == "worker" and beat.alive)
    auto = status.scaling.get("mode") == "auto"
    bounds = f" (auto, {status.scaling['min']} to {status.scaling['max'] or 'what fits'})" if auto else ""
    return (
        f"workers {alive} of {status.desired_workers}{bounds} · policy version {status.version} · policy lag "
        f"{figure(status.metrics.get('policy/lag_mean'))} · checkpoint {status.latest or '–'}\n"
        f"waits for: {status.bottleneck}"
    )


def _returns(metrics: Mapping[str, float | None]) -> str:
    """The mean return of all agents together, and of each policy, or agent, where there are several."""
    told = {name.removeprefix(_EACH): its for name, its in metrics.items() if name.startswith(_EACH)}
    policies = {name: its for name, its in told.items() if f"time/transitions/{name}" in metrics}
    agents = {name: its for name, its in told.items() if name not in policies}
    return figure(metrics.get(_EACH.rstrip("/"))) + each_in_words(policies, agents)


def _evaluated(status: Status) -> str:
    if not status.evaluates:
        return "none (evaluation.episodes=0)"
    scores = status.evaluation
    return f"{_evaluated_return(scores)} ({scores['checkpoint']})" if scores else "–"


def _evaluated_return(scores: Mapping[str, Any]) -> str:
    each = each_in_words(scores.get("policies", {}), scores.get("agents", {}))
    return f"{figure(scores['mean_return'])}{each}{success_in_words(scores)}"


def _best(status: Status) -> str:
    """The score of `status.best` in a second evaluation, from other starts."""
    if (scores := status.best_evaluation) is None:
        return "–"
    rank = f"{scores['ranked_by']} {figure(ranking(scores))}; " if scores.get("ranked_by") else ""
    untrained = ", before any training" if checkpoint_env_steps(status.best or "") == 0 else ""
    return f"{rank}{_evaluated_return(scores)} in a second evaluation ({status.best}{untrained})"


def one_line(status: Status) -> str:
    """Status on one line."""
    if status.state is RunStatus.PAUSED:
        return f"{status.state:<11} {status.reason}"
    metrics = status.metrics
    scores = status.evaluation
    score = f" · evaluated {_evaluated_return(scores)}" if scores else ""
    best = f" · best {figure(ranking(status.best_evaluation))}" if status.best_evaluation else ""
    rating = "".join(f" · rating of {policy_id} {figure(its)}" for policy_id, its in ratings_in(metrics).items())
    return (
        f"{status.state:<11} {status.env_steps:,} env steps · {metrics.get('time/fps') or 0:,.0f}/s · "
        f"training return {_returns(metrics)}{rating}{score}{best} · version {status.version} · "
        f"lag {figure(metrics.get('policy/lag_mean'))} · waits for: {status.bottleneck}"
    )


def print_summary(run: Run, outcome: Outcome, console: Console) -> None:
    """Prints what was learned, where the policy is and how to use it; then what became of the experience."""
    status = outcome.status
    table = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2))  # no path is cut: it is copied
    table.add_row("run", f"{run.run_id}: {reason_in_words(outcome.reason.splitlines()[0])}")
    for row in scores_of_note(status, run.config.league is not None):
        table.add_row(*row)
    numbers = ((status.env_steps, "env step"), (status.updates, "update"), (status.episodes, "episode"))
    table.add_row("trained", ", ".join(counted(number, noun) for number, noun in numbers))
    table.add_row("time", f"{outcome.seconds:.1f} s with start and end{_speed(run, status)}")
    for row in _use(run, status):
        table.add_row(*row)
    if outcome.reason == EndReason.ABANDONED:
        table.add_row("continue", f"stagecoach resume {run.run_id}")
    table.add_row()
    table.add_row(Text("experience", style="bold"), f"see {_CONCEPTS}")
    marks = ", ".join(f"{mark} {getattr(status, mark) or '–'}" for mark in ("latest", "best", "final"))
    table.add_row("checkpoints", marks)
    if total := status.ledger.get("total"):
        table.add_row("ledger", ledger_line(total))
    console.print(Panel(table, title="summary", expand=False))


def scores_of_note(status: Status, league: bool = False) -> Iterator[tuple[str, str]]:
    """Rows for the summary: return of training, of the last evaluation, and of the one that confirmed the best.

    A run that is stopped does not wait for its evaluator, so the newest checkpoint may have no score.
    """
    yield "training return", f"{_returns(status.metrics)}, mean of the last training episodes"
    newest = status.evaluation or {}
    if newest:
        yield "last evaluation", f"{score_in_words(newest, second=False)} ({newest['checkpoint']})"
    if status.best_evaluation:
        yield "best", _best(status)
    if status.latest and status.latest != newest.get("checkpoint"):
        command = f"league {status.run_id}" if league else f"evaluate {status.run_id}/{status.latest}"
        unscored = "has no score, with evaluation.episodes=0"
        why = "was not evaluated before the run ended" if status.evaluates else unscored
        yield "not evaluated", f"{status.latest} {why}: stagecoach {command}"


def _speed(run: Run, status: Status) -> str:
    """`, 5,400 env steps/s`: the mean while training; empty where the metrics do not say it."""
    with contextlib.suppress(StagecoachError, redis.RedisError):  # a summary without it is better than none
        if (speed := training_time(run, status.metrics)[1]) is not None:
            return f", {speed:,.0f} env steps/s while training"
    return ""


def _use(run: Run, status: Status) -> Iterator[tuple[str, str]]:
    """Rows with the path of the best policy, or of the newest, and with the commands that use it."""
    if (name := status.best or status.latest) is None:
        return
    embedded, place, here = run.config.store.url == "embedded", run.store_location, RUNS / run.run_id
    folder = here if here.resolve() == run.folder.path.resolve() else run.folder.path
    path = place.replace(str(run.folder.path), str(folder), 1) if embedded else place
    yield f"{'best' if status.best else 'newest'} policy", f"{name} in {path}/{CHECKPOINTS}"
    use = "use it"
    if run.config.environment.api != "external":  # whose clients alone can play
        yield use, f"stagecoach evaluate {run.run_id if folder is here else folder}"
        use = ""
    own = "" if "default" in run.config.policies else f', "{next(iter(run.config.policies))}"'
    loaded = f'load_policy("{folder if embedded else place}"{own})'
    yield use, f'Run.attach("{run.run_id}").policy()' if place.startswith("s3://") else loaded


def ledger_line(line: dict[str, Any]) -> str:
    """One line of the accounting in words."""
    produced, consumed, in_flight = (line[side]["transitions"] for side in ("produced", "consumed", "in_flight"))
    dropped = dropped_in_words({reason: count["transitions"] for reason, count in line["dropped"].items()})
    balance = "balances" if line["balances"] else "DOES NOT BALANCE"
    return f"{produced:,} produced = {consumed:,} consumed + {dropped} + {in_flight:,} in flight: {balance}"


def dropped_in_words(transitions: dict[str, int]) -> str:
    """`30 dropped (stale 10, lost 20)`."""
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in transitions.items())
    return f"{sum(transitions.values()):,} dropped{f' ({reasons})' if reasons else ''}"


def print_status(run: Run, status: Status, console: PrintableConsole) -> None:
    """Prints what was learned and how to use it; then the processes, and what became of the experience."""
    table = metrics_table(status)
    for row in _use(run, status):
        table.add_row(*row)
    console.print(Panel(table, title=Text(status.run_id, style="bold"), expand=False))
    console.print("\nprocesses and experience", style="bold", end="")
    console.print(f" (see {_CONCEPTS})")
    if status.live or status.roles:
        console.text(_machinery(status))
    if status.fleet is not None:
        console.text(f"fleet: {status.fleet}")
    shown, left_out = of_note(status.roles)
    roles = Table("role", "state", "waits for", "for", "pid", "host", "address", title="roles", title_justify="left")
    for beat in shown:
        state = (f"failed: {beat.ended}" if beat.failure else reason_in_words(beat.ended or "")) or (
            "alive" if beat.alive else f"silent for {beat.age_seconds:.0f} s"
        )
        name = beat.id if beat.id.startswith(beat.role) else f"{beat.role} {beat.id}"
        seconds = f"{beat.waiting_seconds:.1f} of {beat.deadline_seconds:,.0f} s" if beat.waiting_for else ""
        roles.add_row(name, state, beat.waiting_for or "", seconds, str(beat.pid), beat.host, beat.address)
    if shown:
        console.print(roles)
    if left_out:
        console.text(f"and {counted(left_out, 'worker')} more: `stagecoach status {status.run_id} --json` has all")
    for beat in shown:
        if line := in_one_line(beat.stages):
            console.text(f"{beat.id}: {line}")
    if capacity := status.scaling.get("capacity"):
        console.text(f"room for {capacity}")
    accounting = Table("worker", "env steps", title="ledger", title_justify="left")
    unseen = {beat.id for beat in status.roles} - {beat.id for beat in shown}
    for worker, line in [item for item in status.ledger.items() if item[0] not in unseen]:
        accounting.add_row(worker, ledger_line(line))
    if status.ledger:
        console.print(accounting)
    if status.store.get("error"):
        seconds = max(0.0, world.unix_time() - status.store.get("since", world.unix_time()))
        tries = f"{counted(status.store.get('attempts', 0), 'attempt')} in {seconds:.0f} s failed"
        console.print(f"store: {status.store['error']} ({tries}; training continues until the log is full)")
    if kept := status.store.get("undeleted"):
        what = f"{counted(kept['checkpoints'], 'checkpoint')} and {counted(kept['objects'], 'other object')}"
        console.print(f"store: {what} cannot be deleted: {kept['error']}", soft_wrap=True)
    if more := unnamed():
        console.print(f"malformed in Redis and left out: {more:,} more than those named above")


def of_note(roles: Sequence[Beat]) -> tuple[list[Beat], int]:
    """The roles to show, and how many workers are left out: of a large fleet those in trouble, then the slowest."""
    workers = [beat for beat in roles if beat.role == "worker"]

    def rank(beat: Beat) -> tuple[bool, bool, float]:
        return beat.failure is None, beat.alive and beat.last_error is None, acting_speed(beat) or 0.0

    kept = {beat.id for beat in sorted(workers, key=rank)[:_WORKERS_SHOWN]}
    return [beat for beat in roles if beat.role != "worker" or beat.id in kept], max(0, len(workers) - _WORKERS_SHOWN)


def in_one_line(stages: dict[str, float]) -> str:
    working = {stage: spent for stage, spent in stages.items() if stage != "start"}
    total = sum(working.values())
    if total <= 0:
        return ""
    largest = sorted(working.items(), key=lambda item: -item[1])[:_STAGES_SHOWN]
    return ", ".join(f"{stage} {spent / total:.0%}" for stage, spent in largest if spent / total >= 0.005)
