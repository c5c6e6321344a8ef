"""Does each algorithm learn? `make learning LEARNING="--only cartpole-ppo --seeds 5 --budget-minutes 30"`.

Runs what the table asks for and is not there yet, one run at a time, then writes docs/learning/ anew. It can be
interrupted and called again: each run's data are written when it ends, and are not made again unless the task's
settings change (or with `--again`).
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.learning.report import write_report
from benchmarks.learning.results import DATA, is_current, place, read, write
from benchmarks.learning.runner import Job, RunLost, run
from benchmarks.learning.tasks import MODES, PEERS, Mode, Task, load_tasks
from benchmarks.provenance import ROOT, commit


def plan(tasks: Sequence[Task], modes: Sequence[Mode], seeds: int | None, data: Path, *, again: bool) -> list[Job]:
    """What is to be run: short tasks first, a task's seeds after one another, and all inline before any distributed."""
    wanted = [
        Job(task, mode, seed)
        for mode in modes
        for task in tasks
        if mode in (*task.modes, *(PEERS if task.sb3 else ())) and not task.missing
        for seed in range(1, (seeds or task.seeds) + 1)
    ]
    return [job for job in wanted if again or not _done(job, data)]


def _done(job: Job, data: Path) -> bool:
    found = read(place(data, job.task.name, job.mode, job.seed))
    return found is not None and is_current(found, job.task)


def work(jobs: Sequence[Job], budget_minutes: float, data: Path, runs_dir: Path) -> int:
    """Runs what fits into the budget; answers how many runs were lost."""
    began, lost = time.monotonic(), 0
    for number, job in enumerate(jobs, 1):
        used = (time.monotonic() - began) / 60
        if used + job.task.minutes > budget_minutes:
            print(f"{job.run_id}: not begun, {budget_minutes - used:.1f} of the budget's minutes are left", flush=True)
            continue
        try:
            result = run(job, runs_dir)
        except RunLost as error:
            lost += 1
            print(f"{job.run_id}: LOST: {error}", flush=True)
            continue
        write(result, data)
        at = result.reached_at(job.task)
        reached = f"{job.task.reach:g} at {at:,.0f} env steps" if at < float("inf") else f"{job.task.reach:g} never"
        print(
            f"[{number}/{len(jobs)}] {job.run_id}: {result.reason}; {reached}; {result.score:g} at the end; "
            f"{result.seconds:.0f} s",
            flush=True,
        )
    return lost


def _chosen(names: Sequence[str] | None) -> list[Task]:
    tasks = load_tasks()
    unknown = sorted({*(names or ())} - {*tasks})
    if unknown:
        raise SystemExit(f"Error: no task {', '.join(unknown)}; there are {', '.join(tasks)}")
    return [tasks[name] for name in names or tasks]


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line; answers the exit code."""
    parser = argparse.ArgumentParser(prog="make learning", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these tasks, in this order")
    parser.add_argument("--seeds", type=int, help="seeds 1 to this; by default what the table says")
    parser.add_argument("--mode", choices=[*MODES, "both"], default="both")
    parser.add_argument("--beside", choices=PEERS, help="run this library instead, for tasks that have its settings")
    parser.add_argument("--budget-minutes", type=float, default=float("inf"), help="begin nothing that takes longer")
    parser.add_argument("--again", action="store_true", help="also what is there already")
    parser.add_argument("--report", action="store_true", help="run nothing, only write the report anew")
    parser.add_argument("--list", action="store_true", help="run nothing, show what would be run")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the raw data; the report is beside it")
    parser.add_argument(
        "--runs-dir", type=Path, default=ROOT / "runs" / "learning", help="where the runs are meanwhile"
    )
    given = parser.parse_args(arguments)
    tasks = _chosen(given.only)
    for task in tasks:
        if task.missing:
            print(f"{task.name}: left out, {', '.join(task.missing)} is not installed", flush=True)
    modes: Sequence[Mode] = MODES if given.mode == "both" else (given.mode,)
    if given.beside:
        modes = (given.beside,)
    jobs = [] if given.report else plan(tasks, modes, given.seeds, given.data, again=given.again)
    if given.list:
        print("\n".join(f"{job.run_id}: about {job.task.minutes:g} min" for job in jobs))
        return 0
    if jobs and commit().endswith("-dirty"):
        print("Warning: the code is not as committed, so what runs now does not count", file=sys.stderr)
    lost = work(jobs, given.budget_minutes, given.data, given.runs_dir)
    write_report(list(load_tasks().values()), given.data)
    return 1 if lost else 0


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted; what has ended is kept, and the same command continues", file=sys.stderr)
        sys.exit(130)
