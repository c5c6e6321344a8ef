"""docs/learning/README.md from the raw data: the gates, parity of the two modes, curves, and how it was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.learning.curves import draw
from benchmarks.learning.intervals import Array, difference_interval, iqm, iqm_interval, mean_interval
from benchmarks.learning.results import Result, current
from benchmarks.learning.tasks import MODES, Mode, Task

SHARE = 0.8
"""Of the seeds that must reach the gate: four of five."""
Data = Mapping[tuple[str, Mode], Sequence[Result]]

_INTRODUCTION = """\
# Shown to learn

Written by `make learning` from the files in data/; what stands here by hand is lost. Each run is started by the command
line in a process of its own, with a real Redis and S3 server: *inline* has all roles in that process, *distributed* two
rollout workers, trainer and evaluator as Ray actors. Each checkpoint is played, greedily
where a row does not say otherwise, 20 episodes, from starts of its own (data of older commits: from the same 20 starts
each time).

- **Gate**: the mean that a run has to reach before it ends, after so many env steps of training. Warm-up comes before
  them, and the last update may go beyond: every checkpoint counts, and so does the last one.
- **At the gate**: of the seeds that ran, those whose mean was at least the gate at the last checkpoint or at three in a
  row. The luckiest checkpoint counts for nothing. Four of five seeds have to; of a negative control none may.
- **Held**: of the seeds that ran, those whose last checkpoint was at the gate. Where these are fewer, the recipe loses
  what it has reached.
- **At the end**: the interquartile mean over seeds of that last checkpoint, with its 95 % bootstrap interval (Agarwal
  et al. 2021).
- **Steps**: env steps to the gate (to the third of three checkpoints in a row), median over seeds; – where half of them
  did not get there. Warm-up counts here.
"""

_GATES = """\
| task | algorithm | environment | gate | mode | at the gate | passed | held | at the end [95 %] | steps | reference |
|---|---|---|---|---|---|---|---|---|---|---|
"""
_HOW = """\
Nothing is known of these. `make learning LEARNING="--only NAME --mode inline"` runs one, where a run takes long with
`--seeds 3`.
"""
_PARITY = """\
## Parity

Does it matter where the roles run? Compared is the mean over all checkpoints of a run, which says how soon and how well
it learned. The distributed mean must lie in the inline runs' 95 % interval. Where nothing differs, that fails now and
then: with five seeds each, more than every fourth time. So the interval of the difference stands beside it, which then
leaves out 0 every ninth time.

| task | inline, mean [95 %] | distributed, mean | within | difference [95 %] |
|---|---|---|---|---|
"""


def write_report(tasks: Sequence[Task], folder: Path) -> None:
    """README.md and a PNG for each task, beside the folder of the data."""
    data: Data = {(task.name, mode): current(folder, task, mode) for task in tasks for mode in MODES}
    ran = [task for task in tasks if any(data[task.name, mode] for mode in MODES)]
    for task in ran:
        draw(task, {mode: data[task.name, mode] for mode in MODES}, folder.parent / f"{task.name}.png")
    parts = [
        _INTRODUCTION,
        _table("## Gates\n\n" + _GATES, _gates([task for task in ran if not task.negative], data)),
        _table("## Negative controls\n\n" + _GATES, _gates([task for task in ran if task.negative], data)),
        _table(_PARITY, _parity(ran, data)),
        _pictures(ran),
        _not_run(tasks, ran),
        _measured(data),
    ]
    folder.parent.mkdir(parents=True, exist_ok=True)
    (folder.parent / "README.md").write_text("\n".join(part for part in parts if part))


def verdict(task: Task, results: Sequence[Result]) -> str:
    """`yes`, `NO`, or how many seeds there are of those that it takes."""
    reached = _reached(task, results)
    if len(results) < task.seeds:
        return f"{len(results)} of {task.seeds} seeds ran"
    if task.negative:
        return "NO" if reached else "yes"
    return "yes" if reached >= SHARE * len(results) else "NO"


def _reached(task: Task, results: Sequence[Result]) -> int:
    return sum(math.isfinite(one.reached_at(task)) for one in results)


def _table(head: str, rows: Sequence[str]) -> str:
    return head + "\n".join(rows) + "\n" if rows else ""


def _gates(tasks: Sequence[Task], data: Data) -> list[str]:
    return [_row(task, mode, data[task.name, mode]) for task in tasks for mode in MODES if data[task.name, mode]]


def _row(task: Task, mode: Mode, results: Sequence[Result]) -> str:
    scores = np.array([one.score for one in results])
    at = statistics.median(one.reached_at(task) for one in results)
    cells = [
        f"[{task.name}](#{task.name})", task.algorithm, task.environment,
        f"{'below ' if task.negative else ''}{task.reach:g} within {task.within:,}", mode,
        f"{_reached(task, results)} of {len(results)}", verdict(task, results),
        f"{(scores >= task.reach).sum()} of {len(results)}",
        f"{iqm(scores):.4g} {_bracket(*iqm_interval(scores))}", f"{at:,.0f}" if math.isfinite(at) else "–",
        f"{task.reference} ({task.source})",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _parity(tasks: Sequence[Task], data: Data) -> list[str]:
    rows = []
    for task in tasks:
        both = [np.array([one.mean_score for one in data[task.name, mode]]) for mode in MODES]
        if all(len(scores) > 1 for scores in both):
            rows.append(_parity_row(task.name, *both))
    return rows


def _parity_row(name: str, inline: Array, distributed: Array) -> str:
    low, high = mean_interval(inline)
    mean = distributed.mean()
    cells = [
        name, f"{inline.mean():.4g} {_bracket(low, high)} of {len(inline)}", f"{mean:.4g} of {len(distributed)}",
        "yes" if low <= mean <= high else "no", _bracket(*difference_interval(distributed, inline)),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _bracket(low: Array, high: Array) -> str:
    return f"[{low:.4g}, {high:.4g}]"


def _pictures(tasks: Sequence[Task]) -> str:
    shown = [f"### {task.name}\n\n![{task.algorithm} in {task.environment}]({task.name}.png)\n" for task in tasks]
    return "## Curves\n\n" + "\n".join(shown) if shown else ""


def _not_run(tasks: Sequence[Task], ran: Sequence[Task]) -> str:
    names = [task.name for task in tasks if task not in ran]
    return f"## In the table, but not run yet\n\n{', '.join(names)}\n\n{_HOW}" if names else ""


def _measured(data: Data) -> str:
    results = [one for found in data.values() for one in found]
    machines = sorted({f"{one.machine['cpu']}, {one.machine['cores']} cores" for one in results})
    commits = sorted({one.commit for one in results})
    versions = sorted({f"{name} {number}" for one in results for name, number in one.versions.items()})
    hours = sum(one.seconds for one in results) / 3600
    return (
        f"## How it was measured\n\n{len(results)} runs, {hours:.1f} hours in all; what each was made with stands in "
        f"its file.\n\n- machines: {'; '.join(machines)}\n- commits: {', '.join(commits)}\n- {', '.join(versions)}\n"
    )
