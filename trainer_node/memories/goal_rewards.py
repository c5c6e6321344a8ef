"""What a goal environment's reward would be for another goal: the built-in sparse one, or a function of the user's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shared.memory_config import HindsightMemory
from shared.spaces import Array
from shared.user_code import import_object

GoalReward = Callable[[Array, Array], tuple[Array, Array]]
"""`(achieved [B, …], desired [B, …])` → `(reward [B], terminated [B])`, for the goal achieved after the step."""


def goal_reward(config: HindsightMemory) -> GoalReward:
    """The function that the config names; raises `ConfigError` where it cannot be imported."""
    if config.reward == "sparse":
        return sparse(config.threshold, config.terminates)
    found: GoalReward = import_object(config.reward, "algorithm.memory.reward", kind="function")
    return found


def sparse(threshold: float, terminates: bool) -> GoalReward:
    """0 within `threshold` (Euclidean) of the goal, else −1; whether reaching it ends the episode."""

    def reward(achieved: Array, desired: Array) -> tuple[Array, Array]:
        apart = (achieved.astype(np.float64) - desired.astype(np.float64)).reshape(len(achieved), -1)
        reached = np.sqrt(np.square(apart).sum(axis=1)) <= threshold
        return reached.astype(np.float32) - np.float32(1), reached & terminates

    return reward
