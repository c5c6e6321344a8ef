"""`stagecoach study RUN…`, and the numbers behind it: what a run came to, groups of seeds, and their intervals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagecoach.coordinator.run_access.run import Run
from stagecoach.coordinator.run_access.run_comparison import differences, groups_by_seed, result_of
from stagecoach.coordinator.run_access.seed_statistics import (
    improvement_interval,
    interval,
    probability_of_improvement,
)
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


def test_configs_are_compared_over_seeds(ended_run: Run, tmp_path: Path, stagecoach: Stagecoach) -> None:
    made: dict[str, dict[str, Any]] = {"b": {"seed": 7, "algorithm.epochs": 3}, "a-seed-2": {"seed": 2}}
    copies(ended_run, tmp_path / "runs", made | {"a-seed-1": {"seed": 1}})
    found = stagecoach("study", "a-seed-1", "a-seed-2", "b", "--json").json()
    assert found["differences"].keys() == {"algorithm.epochs"} and found["differences"]["algorithm.epochs"][1] == 3
    assert [result["run_id"] for result in found["runs"]] == ["a-seed-1", "a-seed-2", "b"]
    last = result_of(ended_run).last
    first, other = found["configs"]
    assert (first["name"], first["seeds"], first["mean"], first["iqm"]) == ("a", 2, last, last)
    assert first["mean_interval"] == [last, last] and first["improvement"] is None
    assert (other["name"], other["seeds"], other["improvement"]) == ("b", 1, 0.5)
    assert other["mean_interval"] is other["improvement_interval"] is None
    printed = stagecoach("study", "a-seed-1", "a-seed-2", "b", "--score", "best").ok()
    assert "algorithm.epochs" in printed and "P(above a)" in printed and "score: best" in printed
    alone = stagecoach("study", "b", str(tmp_path / "runs" / "b")).ok()
    assert "last evaluation" in alone and "IQM" in alone
    check_refused(stagecoach("study", "b", "bb"), "did you mean b")


def test_probability_of_improvement_counts_pairs() -> None:
    scores, others = np.array([1.0, 3.0, 5.0]), np.array([2.0, 3.0])
    assert probability_of_improvement(scores, others) == pytest.approx((0 + 1.5 + 2) / 6)
    low, high = improvement_interval(scores, others)
    assert 0 <= low < 0.583 < high <= 1
    assert [*map(float, improvement_interval(others, others - 10.0))] == [1.0, 1.0]


def test_differences_name_what_one_lacks_as_well() -> None:
    assert differences({"a": 1, "b": 2}, {"a": 1, "c": None, "b": 3}) == {"b": [2, 3]}
    assert differences({"a": 1}, {}, {"a": 1}) == {"a": [1, None, 1]} and not differences({"a": 1})


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
