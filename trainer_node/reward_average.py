"""Rewards as what they are above their exponentially weighted moving average (Coach's RewardEwmaNormalizationFilter).

Learnt from the log in its order, so that it is the same on every replay; kept in the checkpoint.
"""

from __future__ import annotations

import numpy as np

from shared.spaces import Array, Columns
from trainer_node.reward_scaling import RewardFilter


class RewardAverage(RewardFilter):
    """The running average for one policy id: that of the first fragment, then m ← m + α (fragment's average − m)."""

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha
        self._average: float | None = None

    def scaled(self, reward: Array) -> Array:
        """Rewards less the average so far, float32."""
        found: Array = (reward.astype(np.float64) - (self._average or 0.0)).astype(np.float32)
        return found

    def take_in(self, source: str, columns: Columns) -> None:
        """Moves the average; a fragment in which nobody acted does not."""
        counted = columns["reward"][columns["mask"]].astype(np.float64)
        if not counted.size:
            return
        mean = float(counted.mean())
        self._average = mean if self._average is None else self._average + self._alpha * (mean - self._average)

    def state(self) -> Columns:
        """Named arrays; no number before the first fragment."""
        return {"average": np.array([] if self._average is None else [self._average])}

    def load_state(self, arrays: Columns) -> None:
        """The inverse of `state`."""
        (average,) = arrays["average"].tolist() or [None]
        self._average = average
