"""Interquartile mean and stratified bootstrap intervals (Agarwal et al. 2021, "Deep RL at the edge of the statistical
precipice"). Scores are arrays whose first axis is the seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_RESAMPLES = 2000


def iqm(scores: Array) -> Array:
    """The mean of the middle half along the first axis: a quarter of the seeds, rounded down, is cut at each end."""
    cut = len(scores) // 4
    return np.asarray(np.sort(scores, axis=0)[cut : len(scores) - cut].mean(axis=0))


def bootstrap(
    strata: Sequence[Array],
    statistic: Callable[[Sequence[Array]], Any],
    confidence: float = 0.95,
    resamples: int = _RESAMPLES,
) -> tuple[Array, Array]:
    """The percentile interval of `statistic(strata)`; seeds are drawn with replacement within each stratum.

    The draws begin with the same number each time, so that a report does not change unless its data do.
    """
    draw = np.random.default_rng(0)
    drawn = ([one[draw.integers(len(one), size=len(one))] for one in strata] for _ in range(resamples))
    tail = (1 - confidence) / 2
    low, high = np.quantile([statistic(some) for some in drawn], [tail, 1 - tail], axis=0)
    return low, high


def iqm_interval(scores: Array) -> tuple[Array, Array]:
    """The 95 % interval of the interquartile mean."""
    return bootstrap([scores], lambda strata: iqm(strata[0]))


def mean_interval(scores: Array) -> tuple[Array, Array]:
    """The 95 % interval of the mean."""
    return bootstrap([scores], lambda strata: strata[0].mean(axis=0))


def difference_interval(scores: Array, others: Array) -> tuple[Array, Array]:
    """The 95 % interval of the difference of two means, each group a stratum."""
    return bootstrap([scores, others], lambda strata: strata[0].mean(axis=0) - strata[1].mean(axis=0))
