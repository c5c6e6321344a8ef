"""An environment of one's own, given to Stagecoach as `module:factory`: walk to the target on a line."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np


class Corridor(gym.Env[dict[str, Any], Any]):
    """Observation: position and target (a dict space); actions: left, right; reward 1 at the target, -0.01 a step."""

    def __init__(self, length: int = 8) -> None:
        self.length = length
        self.observation_space = gym.spaces.Dict(
            {"position": gym.spaces.Discrete(length), "target": gym.spaces.Box(0.0, 1.0, (1,), np.float32)}
        )
        self.action_space: gym.spaces.Space[Any] = gym.spaces.Discrete(2)
        self._position, self._target = 0, length - 1

    def _observation(self) -> dict[str, Any]:
        return {"position": self._position, "target": np.array([self._target / (self.length - 1)], np.float32)}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self._position = self.length // 2
        self._target = int(self.np_random.choice([0, self.length - 1]))
        return self._observation(), {}

    def step(self, action: int) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self._position = int(np.clip(self._position + (1 if action else -1), 0, self.length - 1))
        reached = self._position == self._target
        return self._observation(), 1.0 if reached else -0.01, reached, False, {"is_success": reached}


def make(length: int = 8) -> gym.Env[dict[str, Any], Any]:
    """The factory that the config names."""
    return Corridor(length)
