"""A corridor whose length is a parameter: `stagecoach train examples/curriculum.yaml`."""

from typing import Any

import gymnasium as gym
import numpy as np


class Corridor(gym.Env[Any, Any]):
    """Walk right until the end: reward 1. Each step costs a little, and there are three times as many as needed."""

    reset_options = ("length",)

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(0.0, 1.0, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(2)

    def _seen(self) -> Any:
        return np.array([self.at / 50, self.length / 50], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.length = int((options or {}).get("length", 3))
        self.at = self.steps = 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        self.at = max(0, self.at + (1 if action else -1))
        arrived, over = self.at >= self.length, self.steps >= 3 * self.length
        return self._seen(), float(arrived) - 0.01, arrived, over and not arrived, {"is_success": arrived}
