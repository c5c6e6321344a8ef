"""Statistics over seeds: Student's interval of the mean; interquartile mean, probability of improvement and stratified
bootstrap intervals (Agarwal et al. 2021, "Deep RL at the edge of the statistical precipice", as in their rliable).

Scores are arrays whose first axis is the seeds.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stagecoach.shared.experience.spaces import Array

_RESAMPLES = 2000
_CONFIDENCE = 0.95
_POINTS = 20_001


def interval(values: Array) -> tuple[Array, Array]:
    """Mean over the first axis, and half the width of its 95 % interval by Student's t; NaN for a single value.

    For few seeds, the usual case, bootstrap intervals are too narrow.
    """
    count = len(values)
    mean: Array = values.mean(axis=0)
    if count < 2:
        return mean, np.full_like(mean, np.nan)
    half: Array = values.std(axis=0, ddof=1) * (_t_quantile(count - 1) / math.sqrt(count))
    return mean, half


def _t_quantile(freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t; with t = √n · tan a, the density of a is cos^(n-1)."""
    angles = np.linspace(0.0, math.pi / 2, _POINTS)
    density = np.cos(angles) ** (freedom - 1)
    mass = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(freedom) * math.tan(float(np.interp(_CONFIDENCE * mass[-1], mass, angles)))


def iqm(scores: Array) -> Array:
    """The mean of the middle half along the first axis: a quarter of the seeds, rounded down, is cut at each end."""
    cut = len(scores) // 4
    return np.asarray(np.sort(scores, axis=0)[cut : len(scores) - cut].mean(axis=0))


def probability_of_improvement(scores: Array, others: Array) -> float:
    """Share of pairs of seeds whose first score is higher; equal pairs count half. Each argument has one axis."""
    ahead, equal = scores[:, None] > others[None, :], scores[:, None] == others[None, :]
    return float(ahead.mean() + equal.mean() / 2)


def bootstrap(
    strata: Sequence[Array], statistic: Callable[[Sequence[Array]], Any], confidence: float = _CONFIDENCE,
    resamples: int = _RESAMPLES,
) -> tuple[Array, Array]:  # fmt: skip
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


def difference_interval(scores: Array, others: Array) -> tuple[Array, Array]:
    """The 95 % interval of the difference of two means, each group a stratum."""
    return bootstrap([scores, others], lambda strata: strata[0].mean(axis=0) - strata[1].mean(axis=0))


def improvement_interval(scores: Array, others: Array) -> tuple[Array, Array]:
    """The 95 % interval of the probability of improvement, each group a stratum."""
    return bootstrap([scores, others], lambda strata: probability_of_improvement(*strata))
