"""`stagecoach plot`: the lines and dots of a picture, its file, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from stagecoach.coordinator.run_access.run import Run
from stagecoach.coordinator.run_access.seed_statistics import interval
from stagecoach.shared.storage.metric_log import TRAIN, MetricStream
from tests.support.processes.command_line import Stagecoach, check_refused
from tests.support.runs.ended_runs import copies


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved."""
    figures: list[Figure] = []
    save = Figure.savefig

    def saved(figure: Figure, *arguments: object) -> None:
        figures.append(figure)
        save(figure, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Figure, "savefig", saved)
    return figures


def lines(place: Axes) -> list[Line2D]:
    return [line for line in place.lines if line.get_linestyle() != "None"]


def dots(place: Axes) -> list[Line2D]:
    return [line for line in place.lines if line.get_linestyle() == "None" and len(np.asarray(line.get_xdata()))]


def rows(run: Run, stream: str, name: str) -> list[tuple[float, float]]:
    found = [row for part in run.metrics(stream) for _, row in part.named()]
    return [(row["time/env_steps"], row[name]) for row in found if name in row]


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_plot_draws_line_and_evaluation_dots(
    ended_run: Run, stagecoach: Stagecoach, drawn: list[Figure], ending: str
) -> None:
    path = Path(f"curve.{ending}")
    stagecoach("plot", "a", "--runs-dir", str(ended_run.config.runs_dir), "--output", str(path)).ok()
    assert path.read_bytes().startswith({"png": b"\x89PNG", "svg": b"<?xml"}[ending])
    (place,) = drawn[0].axes
    (line,), (evaluated,) = lines(place), dots(place)
    assert line.get_label() == "a"
    np.testing.assert_allclose(np.asarray(line.get_xydata()), np.array(rows(ended_run, "train", "rollout/ep_rew_mean")))
    scores = np.array(rows(ended_run, "evaluations", "eval/ep_rew_mean"))
    np.testing.assert_allclose(np.asarray(evaluated.get_xydata()), scores)
    assert (place.get_xlabel(), place.get_ylabel()) == ("env steps", "rollout/ep_rew_mean")


def test_plot_draws_mean_and_interval_over_seeds(
    ended_run: Run, tmp_path: Path, stagecoach: Stagecoach, drawn: list[Figure]
) -> None:
    made: dict[str, dict[str, Any]] = {
        "x-seed-1": {"seed": 1},
        "x-seed-2": {"seed": 2},
        "other": {"algorithm.learning_rate": 0.1},
    }
    first, second, _ = copies(ended_run, tmp_path / "runs", made)
    extended(second)
    stagecoach("plot", "x-seed-1", "x-seed-2", "other", "--metric", "train/loss").ok()
    assert Path("x-seed-1.png").exists()
    (place,) = drawn[0].axes
    labels = {str(line.get_label()): line for line in lines(place)}
    mean = labels["x (2 seeds: mean, 95 % interval)"]
    steps, values = np.array(rows(first, "train", "train/loss")).T
    more_steps, more = np.array(rows(second, "train", "train/loss")).T
    assert more_steps[-1] > steps[-1] == np.asarray(mean.get_xdata())[-1], "as far as all of them go"
    both = np.array([values[-1], np.interp(steps[-1], more_steps, more)])
    expected, half = interval(both)
    assert np.asarray(mean.get_ydata())[-1] == pytest.approx(expected)
    (band,) = place.collections
    end = np.asarray(band.get_paths()[0].vertices)
    top = end[np.isclose(end[:, 0], steps[-1])][:, 1].max()
    assert top == pytest.approx(expected + half)
    assert {"other"} <= labels.keys() and len(lines(place)) == 4, "two thin ones, their mean, the other run"
    assert mean.get_color() != labels["other"].get_color()


def extended(run: Run) -> None:
    """Gives it a row at later env steps with another loss."""
    last = dict(run.last_metrics()[1])
    stream = MetricStream(run.checkpoint_store().store, run.run_id, TRAIN, 9, 10**6, 10**9)
    stream.append(last | {"time/env_steps": last["time/env_steps"] * 2, "train/loss": last["train/loss"] + 5})
    stream.write()


def test_plot_supports_time_and_updates_and_several_metrics(
    ended_run: Run, stagecoach: Stagecoach, drawn: list[Figure]
) -> None:
    runs = "--runs-dir", str(ended_run.config.runs_dir)
    metrics = "--metric", "train/loss", "--metric", "eval/ep_len_mean"
    stagecoach("plot", "a", *runs, *metrics, "--x", "updates").ok()
    stagecoach("plot", "a", *runs, "--metric", "train/loss", "--x", "time").ok()
    over_updates, lengths = drawn[0].axes
    updates = ended_run.status().updates
    np.testing.assert_allclose(np.asarray(lines(over_updates)[0].get_xdata()), np.arange(1, updates + 1))
    assert len(np.asarray(lines(lengths)[0].get_xdata())) == len(ended_run.checkpoints())
    hours = np.asarray(lines(drawn[1].axes[0])[0].get_xdata())
    assert hours[0] == 0.0 and 0 < hours[-1] < 1


def test_plot_explains_what_it_cannot_draw(ended_run: Run, stagecoach: Stagecoach) -> None:
    runs = "--runs-dir", str(ended_run.config.runs_dir)
    check_refused(stagecoach("plot", "a", *runs, "--metric", "train/los"), "no 'train/los'", "train/loss")
    check_refused(stagecoach("plot", "a", *runs, "--output", "a.gif"), "a.gif", ".png or .svg")
    check_refused(stagecoach("plot", "a", *runs, "--output", "nowhere/a.png"), "cannot write nowhere/a.png")
    check_refused(stagecoach("plot", "nobody", *runs), "no run 'nobody'")
