"""Learning curves as PNG: the interquartile mean over seeds for each mode, with its 95 % interval at each point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from benchmarks.learning.intervals import Array, iqm, iqm_interval
from benchmarks.learning.results import Result
from benchmarks.learning.tasks import Mode, Task

_COLORS: dict[Mode, str] = {"inline": "tab:blue", "distributed": "tab:orange"}
_POINTS = 100


def draw(task: Task, results: Mapping[Mode, Sequence[Result]], path: Path) -> None:
    """Writes the picture; a mode without results is left out."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for mode, found in results.items():
        if found:
            grid, scores = on_grid(found)
            low, high = iqm_interval(scores)
            axes.plot(grid, iqm(scores), color=_COLORS[mode], label=f"{mode}, {len(found)} seeds")
            axes.fill_between(grid, low, high, color=_COLORS[mode], alpha=0.2, linewidth=0)
    axes.axhline(task.reach, color="gray", linestyle="--", linewidth=1, label=f"gate, {task.reach:g}")
    axes.set_title(f"{task.environment}: {task.algorithm}", fontsize="medium")
    axes.set_xlabel("env steps")
    how = "greedy" if task.settings["evaluation"].get("greedy", True) else "as drawn"
    played = f"{'success rate' if task.measure == 'success_rate' else 'return'}, {how}"
    axes.set_ylabel("its judge's score" if task.judge else played)
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    # without the software's version in it the same data make the same bytes
    figure.savefig(path, format="png", metadata={"Software": None})


def on_grid(results: Sequence[Result]) -> tuple[Array, Array]:
    """Env steps [P], and scores [seeds, P]: at each point those of the newest checkpoint so far.

    The grid begins where all seeds have a checkpoint, and ends with the last checkpoint of any.
    """
    first, last = (max(one.evaluations[turn][0] for one in results) for turn in (0, -1))
    grid = np.linspace(first, last, _POINTS)
    scores = []
    for one in results:
        steps, values = np.array(one.evaluations).T
        scores.append(values[np.searchsorted(steps, grid, side="right") - 1])
    return grid, np.array(scores)
