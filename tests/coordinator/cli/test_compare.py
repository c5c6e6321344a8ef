"""`stagecoach compare`, and the numbers behind it: what a run came to, groups of seeds, and their interval."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagecoach.coordinator.run_access.run import Run
from stagecoach.coordinator.run_access.run_comparison import differences, groups_by_seed, interval, result_of
from tests.support.processes.command_line import Stagecoach, check_refused
from tests.support.runs.ended_runs import copies


def test_result_matches_checkpoints_and_rows(ended_run: Run) -> None:
    result, entries = result_of(ended_run), ended_run.checkpoints()
    best = next(entry for entry in entries if "best" in entry["marks"])
    assert (result.best_checkpoint, result.best) == (best["name"], best["evaluation"]["confirmation"]["mean_return"])
    assert result.last == entries[-1]["evaluation"]["mean_return"]
    assert result.evaluations == len(entries)
    rows = [row for part in ended_run.metrics() for _, row in part.named()]
    first, last = rows[0], rows[-1]
    assert result.seconds == pytest.approx(last["time/unix_seconds"] - first["time/unix_seconds"], abs=0.01)
    assert result.env_steps_per_second is not None and result.seconds is not None
    steps = last["time/env_steps"] - first["time/env_steps"]
    assert result.env_steps_per_second * result.seconds == pytest.approx(steps, rel=0.01)


def test_two_runs_are_compared(ended_run: Run, tmp_path: Path, stagecoach: Stagecoach) -> None:
    copies(ended_run, tmp_path / "runs", {"b": {"seed": 7, "algorithm.epochs": 3}})
    shutil.copytree(ended_run.folder.path, tmp_path / "runs" / "a")
    found = stagecoach("compare", "a", "b", "--json").json()
    assert found["differences"].keys() == {"seed", "algorithm.epochs"}
    assert found["differences"]["seed"] == [1, 7]
    assert [result["run_id"] for result in found["runs"]] == ["a", "b"]
    assert found["runs"][0]["best"] == found["runs"][1]["best"] == result_of(ended_run).best
    printed = stagecoach("compare", "a", "b").ok()
    assert "algorithm.epochs" in printed and "best (second" in printed and "env steps/s" in printed
    assert "do not differ" in stagecoach("compare", "a", str(tmp_path / "runs" / "a")).ok(), "a run's folder will do"
    check_refused(stagecoach("compare", "a", "bb"), "did you mean b")


def test_configs_differ_in_what_one_lacks_as_well() -> None:
    assert differences({"a": 1, "b": 2}, {"a": 1, "c": None, "b": 3}) == {"b": (2, 3)}
    assert differences({"a": 1}, {}) == {"a": (1, None)}


def test_seeds_of_one_config_are_a_group(ended_run: Run, tmp_path: Path) -> None:
    made: dict[str, dict[str, Any]] = {"b": {"seed": 2}, "c": {"algorithm.learning_rate": 0.1}, "d": {"seed": 3}}
    runs = copies(ended_run, tmp_path / "runs", made)
    assert [[run.run_id for run in group] for group in groups_by_seed(runs)] == [["b", "d"], ["c"]]
    again = [*runs[:1], *runs]  # a seed's repetition says nothing of others
    assert [[run.run_id for run in group] for group in groups_by_seed(again)] == [["b", "d"], ["b"], ["c"]]


@pytest.mark.parametrize(("count", "quantile"), [(2, 12.7062), (3, 4.3027), (5, 2.7764), (31, 2.0423)])
def test_interval_is_students_t(count: int, quantile: float) -> None:
    """The quantiles are those of a printed table."""
    values = np.random.default_rng(count).normal(size=(count, 4))
    mean, half = interval(values)
    np.testing.assert_allclose(mean, values.mean(axis=0))
    np.testing.assert_allclose(half, quantile * values.std(axis=0, ddof=1) / count**0.5, rtol=1e-4)


def test_interval_of_one_value_is_nan() -> None:
    mean, half = interval(np.array([3.0]))
    assert mean == 3.0 and np.isnan(half)
