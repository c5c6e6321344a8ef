"""`stagecoach train --seeds`: one config with several seeds, each a run of its own in a process of its own."""

from collections.abc import Sequence
from pathlib import Path

import typer

from stagecoach.coordinator.cli.curves.study import show_study
from stagecoach.coordinator.cli.terminal.console import console
from stagecoach.coordinator.cli.terminal.options import Exit
from stagecoach.coordinator.run_access.run import Run
from stagecoach.coordinator.run_access.run_comparison import RunResult, result_of
from stagecoach.coordinator.run_access.run_processes import run_processes
from stagecoach.shared.base.errors import RunExists, StagecoachError, UserError
from stagecoach.shared.base.printable import complain
from stagecoach.shared.protocol.keys import check_run_id

_MOST = 1000


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
    commands = {ids[seed]: [*command, "--run-id", ids[seed], "--set", f"seed={seed}"] for seed in seeds}
    begun = lambda run_id, number: console.text(f"{run_id}: {number} of {len(seeds)}")  # noqa: E731
    codes = run_processes(commands, parallel, begun, _print_end).codes
    _print_summary([run_id for run_id in commands if run_id in codes], runs_dir)
    if waiting := [run_id for run_id in commands if run_id not in codes]:
        complain(f"not begun: {', '.join(waiting)}; the same command with --run-id {name} --or-resume continues")
    if worst := max([*codes.values(), *([Exit.INTERRUPTED] if waiting else [])]):
        raise typer.Exit(worst)


def _print_end(run_id: str, code: int, said: str) -> None:
    console.text(f"{run_id}: {said if said and code else 'ended' if not code else f'ended with exit code {code}'}")


def _print_summary(run_ids: Sequence[str], runs_dir: Path) -> None:
    runs = dict[Run, RunResult]()
    for run_id in run_ids:
        try:
            run = Run.attach(run_id, runs_dir)
            runs[run] = result_of(run)
        except StagecoachError as error:
            console.text(f"{run_id}: {str(error).splitlines()[0]}")
    if runs:
        show_study(runs)
