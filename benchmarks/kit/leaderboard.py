"""docs/benchmarks/time-to.md for people: one table, one picture, and how to repeat it."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.contest.contestants import OURS, RLLIB, SETTINGS_AS_OURS, STABLE_BASELINES3, TORCHRL
from benchmarks.kit.measure import Measure, Result, read
from benchmarks.kit.report import figure, made_with, old, remarks, settings_of

_COLORS = {
    OURS: "tab:red", f"{OURS} --inline": "lightcoral", STABLE_BASELINES3: "tab:blue", SETTINGS_AS_OURS: "lightblue",
    TORCHRL: "tab:green", RLLIB: "tab:gray",
}  # fmt: skip
"""Columns of the table in their order, with the colors of their bars."""
_RECOVERY = "learning again after kill -9 of everything"


def write_leaderboard(result: Result, folder: Path) -> None:
    """From `time-to`, and from `peers-recovery` where that has been measured."""
    found = _seconds(result, folder)
    goals = list(dict.fromkeys(goal for goal, _ in found))
    there = [library for library in _COLORS if any((goal, library) in found for goal in goals)]
    lines = [f"| seconds to | {' | '.join(there)} |", "|---" * (len(there) + 1) + "|"]
    for goal in goals:
        cells = [_cell(found.get((goal, library)), goal, found) for library in there]
        lines.append(f"| {goal} | {' | '.join(cells)} |")
    if found:
        _draw(found, goals, there, folder / "time-to.png")
    parts = [
        "# Time to X\n",
        old(result),
        "How long you wait, from pressing Enter: imports, servers and compilation included. Medians and spread of "
        "repeats; the fastest is bold; a dash was not measured.\n",
        "\n".join(lines) + "\n" if found else "Nothing was measured.\n",
        "![Seconds until each goal is reached, for each library](time-to.png)\n" if found else "",
        f"## How to repeat it\n\n<!-- not run: half an hour, and the peers -->\n```sh\n{result.command}\n"
        "python -m benchmarks peers-recovery --repeats 3\n```\n\n"
        "It installs the peers from PyPI into `.bench/` the first time.\n",
        f"## What is counted\n\n{result.question.strip()}\n\n"
        "[What a kill costs](peers-recovery.md) has its own page.\n",
        "\n".join(f"- {remark}" for remark in remarks(result)) + "\n" if remarks(result) else "",
        settings_of(result),
        made_with(result),
    ]
    (folder / "time-to.md").write_text("\n".join(part for part in parts if part))


def _seconds(result: Result, folder: Path) -> dict[tuple[str, str], Measure]:
    """(goal, library) → line, without samples that are not numbers."""
    found = {}
    for measure in result.measures:
        goal, _, library = measure.what.partition(": ")
        if not measure.against:
            found[goal, library] = measure
    path = folder / "peers-recovery.json"
    for measure in read(path).measures if path.is_file() else ():
        library, _, what = measure.what.partition(": ")
        if what == "learns again after":
            found[_RECOVERY, library] = measure
    kept = {key: [value for value in measure.samples if not math.isnan(value)] for key, measure in found.items()}
    return {key: replace(found[key], samples=samples) for key, samples in kept.items() if samples}


def _cell(measure: Measure | None, goal: str, found: dict[tuple[str, str], Measure]) -> str:
    if measure is None:
        return "–"
    best = min(other.median for (its, _), other in found.items() if its == goal)
    shown = f"**{figure(measure.median)}**" if measure.median == best else figure(measure.median)
    if "not reached" in measure.note:
        shown = f"≥ {figure(measure.median)}"
    if len(measure.samples) < 2:
        return shown
    return f"{shown} ({figure(min(measure.samples))} – {figure(max(measure.samples))})"


def _draw(found: dict[tuple[str, str], Measure], goals: list[str], there: list[str], path: Path) -> None:
    """A group of bars for each goal, the spread as a line, the median as a number."""
    picture = Figure(figsize=(8.0, 0.8 + 0.3 * len(found)), layout="constrained")
    axes = picture.subplots()
    place, ticks = 0.0, []
    for goal in goals:
        first = place
        for library in there:
            if (measure := found.get((goal, library))) is None:
                continue
            median = statistics.median(measure.samples)
            spread = [[median - min(measure.samples)], [max(measure.samples) - median]]
            axes.barh(place, median, xerr=spread, color=_COLORS[library], ecolor="black", capsize=2)
            axes.text(max(measure.samples), place, f"  {library}, {figure(median)} s", va="center", fontsize="x-small")
            place += 1
        ticks.append((first + place - 1) / 2)
        place += 0.8
    axes.set_yticks(ticks, [goal.replace(" to ", "\nto ").replace(" after ", "\nafter ") for goal in goals])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.35 * max(max(measure.samples) for measure in found.values()))
    axes.set_xlabel("seconds from the start of the command (or the kill); less is better")
    axes.spines[["top", "right"]].set_visible(False)
    picture.savefig(path, format="png", metadata={"Software": None})
