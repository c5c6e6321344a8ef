"""`stagecoach plot`: curves of runs as an image; mean and interval over runs that differ only in the seed."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagecoach.coordinator.cli.curves.metrics import Stream, check_metrics, metric_names
from stagecoach.coordinator.cli.terminal.console import console
from stagecoach.coordinator.cli.terminal.options import PLACE, RUNS, EndpointUrl, RunsDir, attached, example, run_ids
from stagecoach.shared.base.errors import UserError
from stagecoach.shared.base.user_code import with_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from stagecoach.coordinator.catalog.run_metrics import Bins
    from stagecoach.coordinator.run_access.run import Run
    from stagecoach.shared.experience.spaces import Array

app = typer.Typer()
_FORMATS = (".png", ".svg")
RETURN = "rollout/ep_rew_mean"
_UPDATES = "train/updates"
_POINTS = 500
_STREAMS = (Stream.TRAIN, Stream.EVALUATIONS, Stream.FLEET)


class Axis(StrEnum):
    ENV_STEPS = "env_steps"
    TIME = "time"
    UPDATES = "updates"


_AXIS_LABELS = {Axis.ENV_STEPS: "env steps", Axis.TIME: "hours since the first row", Axis.UPDATES: "updates"}


@app.command(epilog=example("stagecoach plot my-run-seed-1 my-run-seed-2 other-run --output curves.svg"))
def plot(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help=PLACE.replace("The run's id or folder", "Ids or folders of runs"),
            autocompletion=run_ids,
        ),
    ],
    metric: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="What to draw; may be repeated, a chart each.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PNG or SVG, by its ending; by default RUN.png.")
    ] = None,
    x: Annotated[Axis, typer.Option("--x", help="Over env steps, hours, or updates.")] = Axis.ENV_STEPS,
    runs_dir: RunsDir = RUNS,
    endpoint_url: EndpointUrl = None,
) -> None:
    """Draw curves of runs, with evaluations as dots; runs that differ only in the seed become a mean with its 95 %
    interval."""
    require_matplotlib()
    handles = [attached(run, runs_dir, endpoint_url=endpoint_url) for run in dict.fromkeys(runs)]
    path = output or Path(f"{handles[0].run_id}.png")
    if path.suffix.lower() not in _FORMATS:
        raise UserError(f"--output {path}: expected a name that ends in {' or '.join(_FORMATS)}")
    draw(handles, list(dict.fromkeys(metric or [RETURN])), path, x)
    console.text(path)


def draw(handles: "Sequence[Run]", names: Sequence[str], path: Path, x: Axis = Axis.ENV_STEPS) -> None:
    """Draws a chart per metric into a file; raises `UserError` without matplotlib, and for an unknown metric."""
    make_figure, style = require_matplotlib()
    from stagecoach.coordinator.run_access.run_comparison import groups_by_seed

    groups = groups_by_seed(handles)
    read = {run.run_id: _bins(run, names) for run in handles}
    with style.context(["default", "tableau-colorblind10"]):
        figure = make_figure(figsize=(8.0, 1.0 + 3.6 * len(names)), dpi=144, layout="constrained")
        for place, name in zip(figure.subplots(len(names), squeeze=False)[:, 0], names, strict=True):
            curves = [[_curve(run, read[run.run_id], name, x) for run in group] for group in groups]
            for number, (group, its) in enumerate(zip(groups, curves, strict=True)):
                seeds = re.sub(r"-seed-\d+$", "", group[0].run_id)  # what the ids of several have in common
                _draw(place, seeds if len(group) > 1 else group[0].run_id, its, number)
            if any(len(curve.evaluated_x) for its in curves for curve in its):
                place.plot([], [], ".", color="gray", label="evaluations")
            place.set(xlabel=_AXIS_LABELS[x], ylabel=name)
            place.grid(alpha=0.25)
            place.spines[["top", "right"]].set_visible(False)
            place.legend(frameon=False, fontsize="small")
    try:
        figure.savefig(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None


def require_matplotlib() -> tuple[Any, Any]:
    """Imports matplotlib's Figure and styles; raises `UserError` if it is not installed."""
    try:
        import matplotlib.style
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(f"stagecoach plot: {with_extra(str(error))}") from None
    return Figure, matplotlib.style


@dataclass(frozen=True)
class _Curve:
    """A metric of one run over an axis, with its evaluations."""

    x: "Array"
    y: "Array"
    evaluated_x: "Array"
    evaluated_y: "Array"


def _bins(run: "Run", names: Sequence[str]) -> "dict[Stream, Bins]":
    """Stream → bins of these metrics, some hundred points, read once."""
    from stagecoach.coordinator.catalog.run_metrics import Bins
    from stagecoach.shared.storage.metric_log import ENV_STEPS, UNIX_TIME, Rows

    wanted = {ENV_STEPS, UNIX_TIME, _UPDATES, *names, *map(_score, names)}
    found = {stream: Bins(_POINTS) for stream in _STREAMS}
    for stream, bins in found.items():
        for rows in run.metrics(stream):
            bins.add(Rows({name: rows.columns[name] for name in wanted & rows.columns.keys()}, rows.labels))
    return found


def _score(metric: str) -> str:
    """Name of the metric in evaluations."""
    return metric.replace("rollout/", "eval/", 1)


def _curve(run: "Run", bins: "dict[Stream, Bins]", name: str, axis: Axis) -> _Curve:
    """Extracts a curve; raises `UserError` for an unknown metric."""
    import numpy as np

    stream = next((stream for stream in _STREAMS if name in bins[stream].names), None)
    if stream is None:
        known = [other for stream in _STREAMS for other in metric_names(run, stream)]
        check_metrics(run.run_id, name, known, "in its metrics of training, evaluations and the fleet")
    found = bins[stream or Stream.TRAIN][name]
    x, evaluated_x, evaluated_y = found.env_steps, np.empty(0), np.empty(0)
    if stream is Stream.TRAIN and _score(name) in bins[Stream.EVALUATIONS].names:
        scores = bins[Stream.EVALUATIONS][_score(name)]
        evaluated_x, evaluated_y = scores.env_steps, scores.mean
    if axis is not Axis.ENV_STEPS:
        trained = bins[Stream.TRAIN][_UPDATES]
        reached = trained.mean if axis is Axis.UPDATES else (trained.unix_seconds - trained.unix_seconds[0]) / 3600
        x, evaluated_x = (np.interp(steps, trained.env_steps, reached) for steps in (x, evaluated_x))
    order = np.argsort(x, kind="stable")
    return _Curve(x[order], found.mean[order], evaluated_x, evaluated_y)


def _draw(place: "Axes", name: str, curves: Sequence[_Curve], number: int) -> None:
    """Draws a line for a run, or thin lines for several seeds with mean and interval over their common range."""
    import numpy as np

    from stagecoach.coordinator.run_access.seed_statistics import interval

    color, style = f"C{number % 10}", ("-", "--", ":")[number // 10 % 3]
    for curve in curves:
        place.plot(curve.evaluated_x, curve.evaluated_y, ".", color=color, markersize=6, alpha=0.8)
        if len(curves) > 1:
            place.plot(curve.x, curve.y, color=color, linewidth=0.6, alpha=0.4)
    if len(curves) == 1:
        place.plot(curves[0].x, curves[0].y, style, color=color, linewidth=1.6, label=name)
        return
    grid = np.linspace(max(curve.x[0] for curve in curves), min(curve.x[-1] for curve in curves), _POINTS)
    mean, half = interval(np.array([np.interp(grid, curve.x, curve.y) for curve in curves]))
    place.plot(
        grid, mean, style, color=color, linewidth=1.8, label=f"{name} ({len(curves)} seeds: mean, 95 % interval)"
    )
    place.fill_between(grid, mean - half, mean + half, color=color, alpha=0.18, linewidth=0)
