"""Runs in the foreground, with signals that end them cleanly; detached; or watched."""

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import redis
import typer

from stagecoach.coordinator.catalog.run_files import RunStatus
from stagecoach.coordinator.catalog.status import Status
from stagecoach.coordinator.cli.profile_and_bench import show_profile
from stagecoach.coordinator.cli.terminal.console import PrintableConsole, console
from stagecoach.coordinator.cli.terminal.live_view import LiveView, print_status, print_summary
from stagecoach.coordinator.cli.terminal.options import Exit
from stagecoach.coordinator.lifecycle.supervisor import Outcome, coordinator_thread
from stagecoach.coordinator.run_access.run import Run
from stagecoach.shared.base import world
from stagecoach.shared.base.errors import StagecoachError, UserError
from stagecoach.shared.base.printable import complain, printable
from stagecoach.shared.base.process import handle, report_exits
from stagecoach.shared.runtime.launch import LOGS

_HISTORY = 10
"""Number of past events that `watch` shows first."""
_LIVE = "stagecoach: the run is live"
_ENDS_WITHIN_SECONDS = 10.0
"""Time for an abandoned run to end; a hung environment in this process (`--inline`) may block it."""
_INTERRUPTED = b"interrupted: what was started is being ended\n"


@contextlib.contextmanager
def in_one_process(inline: bool) -> Iterator[None]:
    """Reports an environment that exits this process, which with `--inline` is the whole run, and traces crashes."""

    def report_exit(status: int) -> int:
        console.show_cursor()
        complain(
            f"os._exit({status}) has ended this process, which with --inline is the whole run; above is who called it. "
            f"Without --inline an environment ends its worker only, which is replaced. What is durable stays: "
            f"`stagecoach resume` continues the run"
        )
        return Exit.REFUSED

    if not inline:
        yield
        return
    traced, former = faulthandler.is_enabled(), report_exits(report_exit)
    if not traced:
        faulthandler.enable(all_threads=False)  # only the crashed one
    try:
        yield
    finally:
        os._exit = former  # type: ignore[assignment]
        if not traced:
            faulthandler.disable()


def supervise(
    begin: Callable[..., Run], background: bool = False, detach: bool = False, where: str = "", page: str | None = None
) -> None:
    """Starts (or resumes) a run, shows it until it ends, and turns signals into a clean end.

    `page` is a line to print once it has begun. With `detach` it only sees the run begin, which then continues without
    this process.
    """
    received: list[int] = []
    roles_start = there = asked = False
    away_since = float("inf")
    abandoned: float | None = None

    def on_signal(number: int, _: Any) -> None:
        received.append(number)
        if not roles_start or len(received) > 2:  # Ray does not survive an exception in the midst of joining
            os.write(2, _INTERRUPTED)  # print may have been what was interrupted
            raise KeyboardInterrupt
        if not there:
            os.write(2, b"interrupted: it ends with a last checkpoint once its roles have started\n")

    def listen() -> None:
        handle(on_signal, signal.SIGINT, signal.SIGTERM)

    listen()
    console.quiet = background
    console.print(f"{where or 'checking the config, the environment and the services'} …", style="dim")

    def begun() -> None:
        nonlocal roles_start
        roles_start = True
        if not where:
            console.print("starting the roles …", style="dim")

    run = begin(begun=begun)
    there = True
    if detach:
        _print_detached(run.run_id, "on the cluster")
        return

    def given_up() -> bool:
        """Returns whether an outage outlasts `trainer.grace_seconds` during the end; announces the outage."""
        nonlocal away_since
        away, grace = _away(view.status), run.config.trainer.grace_seconds
        if away is None:
            away_since = float("inf")
        elif away_since == float("inf"):
            away_since = world.monotonic()
            console.text(
                f"ending; a last checkpoint needs {away}. If that is not over in {grace:g} s "
                f"(trainer.grace_seconds), it ends without one, and what is durable stays"
            )
        return world.monotonic() - away_since > grace

    def ended() -> bool:
        nonlocal asked, abandoned
        listen()  # again: a Ray that is started anew is joined in another thread, and puts its own handler for SIGTERM
        if received and not asked:
            with contextlib.suppress(StagecoachError, redis.RedisError):  # ending, or Redis is slow: tried again
                run.stop()
                asked = True
                console.print("ending with a last checkpoint; Ctrl-C again ends at once, and what is durable stays")
        if len(received) > 1 or (received and given_up()):
            run.abandon()
            abandoned = abandoned or world.monotonic()
        if abandoned is not None and not run.ended and world.monotonic() - abandoned > _ENDS_WITHIN_SECONDS:
            abandoned = float("inf")
            console.text(f"it does not end{_place_of(run.run_id)}; Ctrl-C once more leaves that as it is")
        return run.ended

    if background:
        _announce(run)
    console.text(f"run {run.run_id}; its folder is {run.folder.path}")
    view = LiveView(run, PrintableConsole(quiet=True) if background else console, run.first_event)
    if page:
        console.text(page)
    view.show(ended)
    outcome = run.wait()
    _conclude(run, outcome)


def _place_of(run_id: str) -> str:
    """Source line of the supervising thread, which with `--inline` also runs the roles."""
    thread = next((its for its in threading.enumerate() if its.name == coordinator_thread(run_id)), None)
    frame = sys._current_frames().get(thread.ident or 0) if thread else None
    found = traceback.extract_stack(frame)[-1] if frame else None
    return f": it is at {found.filename}:{found.lineno}, in {found.name}" if found else ""


def _conclude(run: Run, outcome: Outcome) -> None:
    """Prints how it ended; raises `Exit` for a run that was abandoned or has failed."""
    print_summary(run, outcome, console)
    if run.config.metrics.profile:
        with contextlib.suppress(UserError):  # if it never began
            show_profile(run)
    if outcome.reason == "abandoned":
        raise typer.Exit(Exit.INTERRUPTED)
    if outcome.failed:
        reason = outcome.reason.splitlines()[0]
        complain(f"run {run.run_id} {reason}; the whole story is in {run.folder.path / LOGS}")
        raise typer.Exit(Exit.REFUSED if outcome.users_fault else Exit.FAILED)


def _away(status: Status | None) -> str | None:
    """Describes the outage of Redis or the store that the run waits for."""
    if status is None:
        return None
    if status.state is RunStatus.PAUSED:
        return status.bottleneck
    return f"{status.store['waiting_for']}: {status.store.get('error')}" if status.store.get("waiting_for") else None


def detach(arguments: list[str], run_id: str) -> None:
    """Runs the same command in a new session; returns once it trains, or fails with its error."""
    command = [argument for argument in arguments if argument != "--detach"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "stagecoach", *command, "--background"], stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    console.print("checking, then starting in the background …", style="dim")
    try:
        live = any(line.strip() == _LIVE for line in process.stdout)  # modules may print while they are imported
    except KeyboardInterrupt:  # the new session does not receive Ctrl-C
        os.write(2, _INTERRUPTED)
        process.send_signal(signal.SIGINT)
        process.communicate()
        raise
    if not live:
        print(printable(process.stderr.read().strip(), lines=True), file=sys.stderr)
        raise typer.Exit(process.wait() or Exit.FAILED)
    os.set_blocking(process.stderr.fileno(), False)  # services that it started hold the pipe too
    with contextlib.suppress(BlockingIOError):
        for line in os.read(process.stderr.fileno(), 1 << 16).decode(errors="replace").splitlines():
            if line.startswith("Warning: "):
                print(printable(line), file=sys.stderr)
    _print_detached(run_id, f"in the background (process {process.pid})")


def _print_detached(run_id: str, where: str) -> None:
    orders = f"  stagecoach watch {run_id}    stagecoach scale {run_id} N    stagecoach stop {run_id}"
    console.text(f"run {run_id} is live {where}", orders)


def _announce(run: Run) -> None:
    """Notifies the waiting process, then redirects output to the run's log."""
    print(f"\n{_LIVE}", flush=True)
    log = os.open(run.folder.path / LOGS / "background.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)


def watch(handle: Run) -> None:
    try:
        LiveView(handle, console, _HISTORY, supervises=False).show(lambda: not handle.live)
    except KeyboardInterrupt:
        console.print("watching ended; the run continues")
        return
    print_status(handle, handle.status(), console)
