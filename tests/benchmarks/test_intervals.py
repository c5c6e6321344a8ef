"""Interquartile mean and bootstrap intervals: known values, every resample counted out, strata kept apart."""

from __future__ import annotations

import itertools
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.learning.intervals import bootstrap, difference_interval, iqm, iqm_interval, mean_interval


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([7.0], 7.0), ([1.0, 3.0], 2.0), ([1.0, 2.0, 9.0], 4.0), ([0.0, 2.0, 4.0, 100.0], 3.0),
        ([100.0, 1.0, 2.0, 3.0, -50.0], 2.0), ([8, 7, 6, 5, 4, 3, 2, 1], 4.5),
    ],
)  # fmt: skip
def test_known_interquartile_means(scores: list[float], expected: float) -> None:
    assert iqm(np.array(scores)) == expected


@settings(deadline=None)
@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=12))
def test_the_interquartile_mean_drops_a_quarter_at_each_end(scores: list[float]) -> None:
    left = list(scores)
    for _ in range(int(0.25 * len(scores))):
        left.remove(min(left))
        left.remove(max(left))
    assert iqm(np.array(scores)) == pytest.approx(statistics.fmean(left), abs=1e-9)


def test_points_of_a_curve_are_independent() -> None:
    scores = np.random.default_rng(1).normal(size=(5, 7))
    assert iqm(scores).tolist() == [iqm(column) for column in scores.T]
    low, high = iqm_interval(scores)
    assert low.shape == high.shape == (7,)
    assert (low <= iqm(scores)).all() and (iqm(scores) <= high).all()


def test_the_interval_is_that_of_all_resamples() -> None:
    """Four seeds can be drawn in 256 ways; so the true distribution can be counted out."""
    scores = np.array([1.0, 2.0, 4.0, 11.0])
    means = [statistics.fmean(drawn) for drawn in itertools.product(scores, repeat=4)]
    low, high = bootstrap([scores], lambda strata: strata[0].mean(), confidence=0.8, resamples=20_000)
    assert low == pytest.approx(np.quantile(means, 0.1), abs=0.3)
    assert high == pytest.approx(np.quantile(means, 0.9), abs=0.3)


def test_a_wider_interval_for_more_confidence_and_fewer_seeds() -> None:
    scores = np.random.default_rng(2).normal(size=20)

    def width(some: np.ndarray, confidence: float = 0.95) -> float:
        low, high = bootstrap([some], lambda strata: strata[0].mean(), confidence)
        return float(high - low)

    assert width(scores, 0.5) < width(scores, 0.95) < width(scores[:5], 0.95)


def test_seeds_are_drawn_within_their_stratum() -> None:
    """Whatever is drawn, the groups stay as large and as different as they are."""
    assert [float(bound) for bound in difference_interval(np.ones(3), np.zeros(7))] == [1.0, 1.0]
    sizes = bootstrap([np.ones(3), np.zeros(7)], lambda strata: [len(one) for one in strata])
    assert [list(bound) for bound in sizes] == [[3, 7], [3, 7]]


def test_the_same_scores_give_the_same_interval() -> None:
    scores = np.array([1.0, 5.0, 9.0, 2.0, 2.0])
    assert mean_interval(scores) == mean_interval(scores)
    assert difference_interval(scores, scores)[0] < 0 < difference_interval(scores, scores)[1]
