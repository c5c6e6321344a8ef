"""docs/benchmarks/ from the results: a page and a picture for each benchmark, and an index of all that were made."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.kit.measure import Curve, Measure, Result, reached, read

_HEAD = """\
| what | unit | median | spread | compared with | ratio | spread | aim | reached |
|---|---|---|---|---|---|---|---|---|
"""
_INDEX = """\
# Benchmarks

Written by `make bench` (`stagecoach bench NAME`) from the JSON files beside it; what stands here by hand is lost.
Medians over repeats. A ratio is between two things that were measured right after each other, in the same run, and is
worth more than any figure alone: machines differ and are noisy. `make bench-check` measures again and compares ratios.

| benchmark | measured | repeats | aims reached |
|---|---|---|---|
"""


def write_page(result: Result, folder: Path) -> None:
    """`NAME.md` and its pictures."""
    pictures = _draw(result, folder)
    parts = [
        f"# {result.benchmark}\n\n{result.question}\n\n`{result.command}`\n",
        _HEAD + "\n".join(_row(result, measure) for measure in result.measures) + "\n" if result.measures else "",
        "\n".join(f"![{name}]({name}.png)" for name in pictures) + "\n" if pictures else "",
        "\n".join(f"- {remark}" for remark in _remarks(result)) + "\n" if _remarks(result) else "",
        _settings(result),
        _made_with(result),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{result.benchmark}.md").write_text("\n".join(part for part in parts if part))


def write_index(folder: Path) -> None:
    """README.md, from every result in the folder."""
    rows = []
    for path in sorted(folder.glob("*.json")):
        result = read(path)
        aims = [met for measure in result.measures if (met := reached(result, measure)) is not None]
        repeats = max((len(measure.samples) for measure in result.measures), default=0)
        name = result.benchmark
        rows.append(f"| [{name}]({name}.md) | {result.made[:10]} | {repeats} | {sum(aims)} of {len(aims)} |")
    (folder / "README.md").write_text(_INDEX + "\n".join(rows) + "\n")


def figure(value: float) -> str:
    """Three digits, or whole numbers in groups."""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _spread(values: Sequence[float]) -> str:
    return f"{figure(min(values))} – {figure(max(values))}" if len(values) > 1 else "once"


def _row(result: Result, measure: Measure) -> str:
    ratio, ratio_spread = "", ""
    if measure.against:
        ratios = result.ratios(measure)
        ratio, ratio_spread = f"**{statistics.median(ratios):.3g}**", _spread(ratios)
    aim = "" if measure.aim is None else f"{'≥' if measure.better == 'more' else '≤'} {figure(measure.aim)}"
    met = {None: "", True: "yes", False: "NO"}[reached(result, measure)]
    cells = [
        measure.what, measure.unit, figure(measure.median), _spread(measure.samples), measure.against, ratio,
        ratio_spread, aim, met,
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _remarks(result: Result) -> list[str]:
    return [*result.remarks, *(f"{measure.what}: {measure.note}" for measure in result.measures if measure.note)]


def _settings(result: Result) -> str:
    if not result.settings:
        return ""
    return f"## Settings\n\n```json\n{json.dumps(result.settings, indent=1, ensure_ascii=False)}\n```\n"


def _made_with(result: Result) -> str:
    made = ", ".join(f"{name} {number}" for name, number in result.versions.items())
    machine = ", ".join(f"{name}: {value}" for name, value in result.machine.items())
    return (
        f"## Measured with\n\n{result.made}; {machine}; load when it began {result.load:.2f}; commit "
        f"{result.commit or 'unknown'}; {made}. Samples: [{result.benchmark}.json]({result.benchmark}.json).\n"
    )


def _draw(result: Result, folder: Path) -> list[str]:
    """Names of the pictures: bars of all that is compared, and the curves."""
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    compared = [measure for measure in result.measures if measure.against]
    if compared:
        _bars(result, compared, folder / f"{result.benchmark}.png")
        names.append(result.benchmark)
    pictures: dict[str, list[Curve]] = {}
    for curve in result.curves:
        pictures.setdefault(curve.picture, []).append(curve)
    for name, curves in pictures.items():
        _curves(name, curves, folder / f"{name}.png")
        names.append(name)
    return names


def _bars(result: Result, measures: Sequence[Measure], path: Path) -> None:
    """Ratios with their spread, and the aims as marks."""
    picture = Figure(figsize=(8.0, 0.9 + 0.34 * len(measures)), layout="constrained")
    axes = picture.subplots()
    for place, measure in enumerate(measures):
        ratios = result.ratios(measure)
        median = statistics.median(ratios)
        spread = [[median - min(ratios)], [max(ratios) - median]]
        axes.barh(place, median, xerr=spread, color="tab:blue", ecolor="tab:gray", capsize=2)
        if measure.aim is not None:
            axes.plot([measure.aim] * 2, [place - 0.4, place + 0.4], color="tab:red", linewidth=2)
    axes.set_yticks(range(len(measures)), [f"{one.what}\n÷ {one.against}" for one in measures], fontsize="x-small")
    axes.invert_yaxis()
    axes.axvline(1, color="gray", linewidth=1, linestyle="--")
    axes.set_xlabel("ratio, median and spread over repeats; red: the aim")
    axes.set_title(result.benchmark, fontsize="medium")
    picture.savefig(path, format="png", metadata={"Software": None})


def _curves(name: str, curves: Sequence[Curve], path: Path) -> None:
    picture = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = picture.subplots()
    for curve in curves:
        x, y = zip(*curve.points, strict=True)
        axes.plot(x, y, "--" if curve.dashed else "o-", label=curve.name, linewidth=1.2, markersize=3)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(curves[0].x_unit)
    axes.set_ylabel(curves[0].y_unit)
    axes.set_title(name, fontsize="medium")
    axes.legend(fontsize="x-small")
    axes.grid(alpha=0.3)
    picture.savefig(path, format="png", metadata={"Software": None})
