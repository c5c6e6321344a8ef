"""When a goal counts as achieved: the same for environments with levels and for hindsight."""

from collections.abc import Sequence

import numpy as np

from stagecoach.shared.experience.spaces import Array

ACHIEVED, DESIRED = "achieved_goal", "desired_goal"
"""Leaves of what is observed in goal environments, and by levels with a goal."""
BELOW = "achieved_below"
"""Leaf of what a level observes: what is achieved, in the terms of the goals that it gives."""
MISSED = "subgoal_missed"
"""In `info`, after an action of an upper level whose goal was tested: 1 where it was missed, 0 where achieved."""


def reached(achieved: Array, desired: Array, threshold: float | Sequence[float]) -> Array:
    """`[B]`, bool, of goals `[B, …]`: within `threshold` (Euclidean), or each element within its own of a list."""
    apart = (achieved.astype(np.float64) - desired.astype(np.float64)).reshape(len(achieved), -1)
    if isinstance(threshold, Sequence):
        return np.asarray((np.abs(apart) <= np.asarray(threshold)).all(axis=1))
    return np.asarray(np.sqrt(np.square(apart).sum(axis=1)) <= threshold)
