"""Goals and their achievement, the same for environments with levels and for hindsight."""

from collections.abc import Sequence

import numpy as np

from stagecoach.shared.experience.spaces import Array

ACHIEVED, DESIRED = "achieved_goal", "desired_goal"
"""Leaves of observations in goal environments, and of levels with a goal."""
BELOW = "achieved_below"
"""Leaf of an upper level's observation: the achieved goal, in the terms of the goals that it sets."""
MISSED = "subgoal_missed"
"""Key in `info` after an action of an upper level whose goal was tested: 1 if it was missed, 0 if achieved."""


def reached(achieved: Array, desired: Array, threshold: float | Sequence[float]) -> Array:
    """Returns `[B]`, bool, for goals `[B, …]`: within `threshold` (Euclidean), or each element within its own."""
    apart = (achieved.astype(np.float64) - desired.astype(np.float64)).reshape(len(achieved), -1)
    if isinstance(threshold, Sequence):
        return np.asarray((np.abs(apart) <= np.asarray(threshold)).all(axis=1))
    return np.asarray(np.sqrt(np.square(apart).sum(axis=1)) <= threshold)
