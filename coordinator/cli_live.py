"""A run in the foreground, from its start to its end, with signals that end it in order; or detached; or watched."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import redis
import typer

from coordinator.cli_measure import show_profile
from coordinator.cli_options import PrintableConsole, console
from coordinator.console import LiveView, print_status, print_summary
from coordinator.run import Run
from shared.errors import StagecoachError, UserError
from shared.launch import LOGS
from shared.printable import complain, printable

_HISTORY = 10
"""Past events that `watch` begins with."""
_LIVE = "stagecoach: the run is live"
_INTERRUPTED = b"interrupted: what was started is being ended\n"


def tend(begin: Any, background: bool = False, detach: bool = False, where: str = "") -> None:
    """Starts (or resumes) a run, shows it until it ends, and turns signals into a clean end.

    With `detach` it only sees the run begin, which then goes on without this process.
    """

    received: list[int] = []
    roles_start, there = threading.Event(), threading.Event()
    asked = False

    def on_signal(number: int, _: Any) -> None:
        received.append(number)
        if not roles_start.is_set() or len(received) > 2:  # Ray does not survive an exception in the midst of joining
            os.write(2, _INTERRUPTED)  # print may have been what was interrupted
            raise KeyboardInterrupt
        if not there.is_set():
            os.write(2, b"interrupted: it ends with a last checkpoint once its roles have started\n")

    def listen() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, on_signal)

    listen()
    if not background:
        console.print(f"{where or 'checking the config, the environment and the services'} …", style="dim")

    def begun() -> None:
        roles_start.set()
        if not (background or where):
            console.print("starting the roles …", style="dim")

    run: Run = begin(begun=begun)
    there.set()
    if detach:
        _tell_detached(run.run_id, "on the cluster")
        return
    listen()  # again: joining Ray has put a handler of its own for SIGTERM

    def ended() -> bool:
        nonlocal asked
        if received and not asked:
            with contextlib.suppress(StagecoachError, redis.RedisError):  # ending, or Redis is slow: tried again
                run.stop()
                asked = True
                console.print("ending with a last checkpoint; Ctrl-C again ends at once, and what is durable stays")
        if len(received) > 1:
            run.abandon()
        return run.ended

    if background:
        _announce(run)
        console.quiet = True
    else:
        where = f"run {run.run_id}; its folder is {run.folder.path}"
        console.print(where, highlight=False, soft_wrap=True)
    LiveView(run, PrintableConsole(quiet=True) if background else console, run.first_event).show(ended)
    outcome = run.wait()
    print_summary(run, outcome, console)
    if run.config.signals.profile:
        with contextlib.suppress(UserError):  # of one that never began
            show_profile(run)
    if outcome.reason == "abandoned":
        raise typer.Exit(130)
    if outcome.failed:
        reason = outcome.reason.splitlines()[0]
        complain(f"run {run.run_id} {reason}; the whole story is in {run.folder.path / LOGS}")
        raise typer.Exit(2 if outcome.users_fault else 1)


def detach(arguments: list[str], run_id: str) -> None:
    """The same command in a session of its own; returns when it trains, or with its error."""
    command = [sys.executable, "-P", "-m", "coordinator.cli", *arguments, "--background"]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    console.print("checking, then starting in the background …", style="dim")
    try:
        live = any(line.strip() == _LIVE for line in process.stdout)  # modules may print while they are imported
    except KeyboardInterrupt:  # its session is its own: it has not heard of it
        os.write(2, _INTERRUPTED)
        process.send_signal(signal.SIGINT)
        process.communicate()
        raise
    if not live:
        print(printable(process.stderr.read().strip(), lines=True), file=sys.stderr)
        raise typer.Exit(process.wait() or 1)
    _tell_detached(run_id, f"in the background (process {process.pid})")


def _tell_detached(run_id: str, where: str) -> None:
    console.print(f"run {run_id} is live {where}", highlight=False)
    console.print(
        f"  stagecoach watch {run_id}    stagecoach scale {run_id} N    stagecoach stop {run_id}", highlight=False
    )


def _announce(run: Run) -> None:
    """Tells the process that waits, and takes the output to the run's log from here on."""
    print(f"\n{_LIVE}", flush=True)
    log = os.open(run.folder.path / LOGS / "background.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)


def watch(handle: Run) -> None:
    try:
        hint = "Ctrl-C ends the watching, not the run"
        LiveView(handle, console, handle.recent(_HISTORY), hint).show(lambda: not handle.live)
    except KeyboardInterrupt:
        console.print("watching ended; the run goes on")
        return
    print_status(handle.status(), console)
