"""Learning curves as one PNG: the interquartile mean over seeds for each mode, with its 95 % interval at each point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter

from benchmarks.learning.results import Result
from benchmarks.learning.tasks import Mode, Task
from stagecoach.coordinator.run_access.seed_statistics import iqm, iqm_interval
from stagecoach.shared.experience.spaces import Array

_COLORS: dict[Mode, str] = {"inline": "tab:blue", "distributed": "tab:orange", "sb3": "tab:gray"}
_NAMES: dict[Mode, str] = {"inline": "inline", "distributed": "distributed", "sb3": "Stable-Baselines3"}
_COLUMNS = 6
_POINTS = 100


def draw_grid(rows: Sequence[tuple[Task, Mapping[Mode, Sequence[Result]]]], path: Path) -> None:
    """Writes one picture with a panel for each row; a mode without results is left out."""
    lines = max(1, -(-len(rows) // _COLUMNS))
    figure = Figure(figsize=(2.5 * _COLUMNS, 1.9 * lines), layout="constrained")
    panels = figure.subplots(lines, _COLUMNS, squeeze=False).ravel()
    for axes, (task, results) in zip(panels, rows, strict=False):
        _draw(axes, task, results)
    for axes in panels[len(rows) :]:
        axes.set_axis_off()
    labels = [Line2D([], [], color=color, label=_NAMES[mode]) for mode, color in _COLORS.items()]
    figure.legend(handles=labels, loc="outside upper center", ncols=len(labels), fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    # without the software's version in it the same data make the same bytes
    figure.savefig(path, format="png", metadata={"Software": None})


def _draw(axes: Axes, task: Task, results: Mapping[Mode, Sequence[Result]]) -> None:
    for mode, found in results.items():
        if found:
            grid, scores = on_grid(found)
            low, high = iqm_interval(scores)
            axes.plot(grid, iqm(scores), color=_COLORS[mode], linewidth=1)
            axes.fill_between(grid, low, high, color=_COLORS[mode], alpha=0.2, linewidth=0)
    axes.axhline(task.reach, color="gray", linestyle="--", linewidth=1)
    axes.set_title(task.name, fontsize=7)
    axes.tick_params(labelsize=6)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.3)


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
