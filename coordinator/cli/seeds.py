"""`stagecoach train --seeds`: one config with several seeds, each a run of its own in a process of its own."""

import math
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import typer
from rich.table import Column, Table

from stagecoach.coordinator.cli.terminal.console import NARROW, console
from stagecoach.coordinator.cli.terminal.options import Exit
from stagecoach.coordinator.run_access.run import Run
from stagecoach.coordinator.run_access.run_comparison import RunResult, interval, result_of
from stagecoach.shared.base import world
from stagecoach.shared.base.errors import RunExists, StagecoachError, UserError
from stagecoach.shared.base.failure import reason_in_words
from stagecoach.shared.base.printable import complain, figure
from stagecoach.shared.base.process import end_with_parent, handling
from stagecoach.shared.protocol.keys import check_run_id

_MOST = 1000
_POLL_SECONDS = 0.1
_SCORES = {"training return": "training_return", "last evaluation": "last", "best": "best"}
"""Column of the summary → field of a run's result."""


def parse_seeds(text: str, first: int) -> list[int]:
    """`5`: so many, from `first` on; `1,2,7` (or `7,`): these. Raises `UserError`."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() for part in parts):
        raise UserError(f"--seeds {text}: expected a number of seeds (5), or seeds with commas between (1,2,7)")
    numbers = [int(part) for part in parts]
    seeds = list(range(first, first + min(numbers[0], _MOST + 1))) if "," not in text else numbers
    if not 1 <= len(seeds) <= _MOST:
        raise UserError(f"--seeds {text}: expected 1 to {_MOST} seeds")
    if len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds {text}: each seed once")
    return seeds


def command_of(config: Path, sets: Sequence[str], options: Mapping[str, str | Path | bool | None]) -> list[str]:
    """Arguments of `stagecoach` that train this config so."""
    command = ["train", str(config), *(part for change in sets for part in ("--set", change))]
    for option, value in options.items():
        command += [option] if value is True else [option, str(value)] if value else []
    return command


def train_seeds(name: str, seeds: Sequence[int], command: Sequence[str], parallel: int, runs_dir: Path) -> None:
    """Trains `NAME-seed-N` for each seed, `parallel` at a time, and sums up; exits with the worst of their exit codes.

    A signal is passed on to the runs at work, and none begins after it. One run at a time has the terminal.

    Args:
        command: arguments of `stagecoach`, to which run id and seed are added.
    """
    ids = {seed: check_run_id(f"{name}-seed-{seed}") for seed in seeds}
    known = [run_id for run_id in ids.values() if (runs_dir.expanduser() / run_id).exists()]
    if known and not {"--or-resume", "--force"} & set(command):
        where = f"{runs_dir.expanduser().resolve()} (runs_dir)"
        raise RunExists(f"run {known[0]!r} exists in {where}; choose another --run-id, or continue: --or-resume")
    waiting, codes, signaled = deque(seeds), dict[int, int](), False
    running: dict[int, tuple[subprocess.Popen[bytes], IO[bytes] | None]] = {}

    def on_signal(number: int, _: Any) -> None:
        nonlocal signaled
        signaled = True
        for process, _ in running.values():
            process.send_signal(number)

    with handling(on_signal, signal.SIGINT, signal.SIGTERM):
        while running or (waiting and not signaled):
            if waiting and len(running) < parallel and not signaled:
                seed = waiting.popleft()
                console.text(f"{ids[seed]}: {len(seeds) - len(waiting)} of {len(seeds)}")
                running[seed] = _start([*command, "--run-id", ids[seed], "--set", f"seed={seed}"], parallel > 1)
                continue
            for seed, (process, errors) in list(running.items()):
                if (code := process.poll()) is not None:
                    codes[seed] = code if code >= 0 else 128 - code
                    del running[seed]
                    _print_end(ids[seed], codes[seed], errors)
            world.sleep(_POLL_SECONDS)
    _print_summary([ids[seed] for seed in seeds if seed in codes], runs_dir)
    if waiting:
        complain(
            f"not begun: {', '.join(ids[seed] for seed in waiting)}; the same command with --run-id {name} "
            f"--or-resume continues"
        )
    if worst := max([*codes.values(), *([Exit.INTERRUPTED] if waiting else [])]):
        raise typer.Exit(worst)


def _start(arguments: Sequence[str], beside_others: bool) -> tuple[subprocess.Popen[bytes], IO[bytes] | None]:
    """Starts a process; with others in parallel, also returns a file of its errors until it is live."""
    command = [sys.executable, "-P", "-m", "stagecoach", *arguments]
    errors = tempfile.TemporaryFile() if beside_others else None  # noqa: SIM115
    output = subprocess.DEVNULL if beside_others else None
    process = subprocess.Popen(
        [*command, *(["--background"] if beside_others else [])], stdin=subprocess.DEVNULL, stdout=output,
        stderr=errors, start_new_session=True, preexec_fn=end_with_parent(signal.SIGTERM),
    )  # fmt: skip
    return process, errors


def _print_end(run_id: str, code: int, errors: IO[bytes] | None) -> None:
    if errors is not None:
        with errors:
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip().splitlines() if code else []
        console.text(f"{run_id}: {said[-1] if said else 'ended' if not code else f'ended with exit code {code}'}")


def _print_summary(run_ids: Sequence[str], runs_dir: Path) -> None:
    """A line for each run, then mean, standard deviation and interval of each score."""
    table = Table(Column("run", overflow="fold"), "state", "env steps", *_SCORES, **NARROW)
    results: list[RunResult] = []
    for run_id in run_ids:
        try:
            results.append(result := result_of(Run.attach(run_id, runs_dir)))
        except StagecoachError as error:
            table.add_row(run_id, str(error).splitlines()[0])
            continue
        state = reason_in_words(result.reason.partition("\n")[0]) or result.state
        scores = [figure(getattr(result, field)) for field in _SCORES.values()]
        table.add_row(run_id, state, f"{result.env_steps:,}", *scores)
    table.add_section()
    rows: dict[str, list[str]] = {"mean": [], "standard deviation": [], "95 % interval": []}
    for field in _SCORES.values():
        values = np.array([value for result in results if (value := getattr(result, field)) is not None])
        mean, half = map(float, interval(values)) if len(values) else (math.nan, math.nan)
        several = len(values) > 1
        rows["mean"].append(figure(mean if len(values) else None))
        rows["standard deviation"].append(figure(float(values.std(ddof=1)) if several else None))
        rows["95 % interval"].append(f"{figure(mean - half)} to {figure(mean + half)}" if several else "–")
    for title, cells in rows.items():
        table.add_row(title, "", "", *cells)
    console.print(table)
    if told := " and ".join(sorted({result.ranked_by for result in results} - {""})):
        console.text(f"best is by {told}; last evaluation is the return of all agents together")
