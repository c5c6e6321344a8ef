"""Runs trained in processes of their own, several at a time: the seeds of `train --seeds`, and a study's trials."""

import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any, NamedTuple

from stagecoach.shared.base import world
from stagecoach.shared.base.process import end_with_parent, handling

_POLL_SECONDS = 0.1
Started = tuple[subprocess.Popen[bytes], IO[bytes] | None]
OnStart = Callable[[str, int], None]
"""Called with the run's id and the number of runs that have begun."""
OnEnd = Callable[[str, int, str], None]
"""Called with the run's id, its exit code and the last line of its errors."""


class Done(NamedTuple):
    """Result of several runs."""

    codes: dict[str, int]
    """Run id → exit code, 128 + N for signal N; without runs that never began."""
    signaled: bool
    """A signal or `stops` ended them."""


def command_of(config: Path, sets: Sequence[str], options: Mapping[str, str | Path | bool | None]) -> list[str]:
    """Arguments of `stagecoach` that train this config so."""
    command = ["train", str(config), *(part for change in sets for part in ("--set", change))]
    for option, value in options.items():
        command += [option] if value is True else [option, str(value)] if value else []
    return command


def run_processes(
    commands: Mapping[str, Sequence[str]], parallel: int, begun: OnStart, ended: OnEnd, *, quiet: bool = False,
    stops: Callable[[], bool] = lambda: False,
) -> Done:  # fmt: skip
    """Runs `stagecoach` for each run id with its arguments, `parallel` at a time.

    A signal is passed on to the runs at work, and none begins after it; the same once `stops()` returns True. One run
    at a time has the terminal, unless `quiet`.
    """
    waiting, codes, signaled = deque(commands), dict[str, int](), False
    running: dict[str, Started] = {}

    def on_signal(number: int, _: Any) -> None:
        nonlocal signaled
        signaled = True
        for process, _ in running.values():
            process.send_signal(number)

    in_main = threading.current_thread() is threading.main_thread()
    with handling(on_signal, signal.SIGINT, signal.SIGTERM) if in_main else nullcontext():
        while running or (waiting and not signaled):
            if waiting and len(running) < parallel and not signaled:
                run_id = waiting.popleft()
                begun(run_id, len(commands) - len(waiting))
                running[run_id] = start_process(commands[run_id], quiet or parallel > 1)
                continue
            for run_id, (process, errors) in list(running.items()):
                if (code := process.poll()) is not None:
                    codes[run_id] = code if code >= 0 else 128 - code
                    del running[run_id]
                    ended(run_id, codes[run_id], _last_line(errors))
            if not signaled and stops():
                on_signal(signal.SIGTERM, None)
            world.sleep(_POLL_SECONDS)
    return Done(codes, signaled)


def start_process(arguments: Sequence[str], quiet: bool) -> Started:
    """Starts `stagecoach` in a process; a quiet one has no terminal, and a file for its errors until it is live."""
    command = [sys.executable, "-P", "-m", "stagecoach", *arguments, *(["--background"] if quiet else [])]
    errors = tempfile.TemporaryFile() if quiet else None  # noqa: SIM115
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL if quiet else None, stderr=errors,
        start_new_session=True, preexec_fn=end_with_parent(signal.SIGTERM),
    )  # fmt: skip
    return process, errors


def _last_line(errors: IO[bytes] | None) -> str:
    if errors is None:
        return ""
    with errors:
        errors.seek(0)
        return next(reversed(errors.read().decode(errors="replace").strip().splitlines()), "")
