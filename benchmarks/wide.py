"""An environment whose observations are as wide as asked for and cost nothing: what is left is carrying them."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from shared.spaces import Array

_TAKES = 4
_MOST_FLOATS = 1 << 21
"""Of recorded observations, all together."""


def _spaces(size: int) -> tuple[gym.spaces.Box, gym.spaces.Discrete]:
    return gym.spaces.Box(-1.0, 1.0, (size,), np.float32), gym.spaces.Discrete(2)


class Wide(gym.Env[Array, Any]):
    """One of them, for its spaces; ends at its first step."""

    def __init__(self, size: int) -> None:
        self.observation_space, self.action_space = _spaces(size)
        self._zeros = np.zeros(size, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        return self._zeros, {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        return self._zeros, 1.0, True, False, {}


class WideVector(gym.vector.VectorEnv[Array, Array, Array]):
    """Many of them, without end: observations are drawn once and shown in turns."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, size: int, num_envs: int) -> None:
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = _spaces(size)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        takes = max(1, min(_TAKES, _MOST_FLOATS // (size * num_envs)))
        random = np.random.default_rng(0)
        self._shown = [random.uniform(-1, 1, (num_envs, size)).astype(np.float32) for _ in range(takes)]
        self._reward = np.ones(num_envs, np.float32)
        self._never = np.zeros(num_envs, np.bool_)
        self._steps = 0

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        return self._shown[0], {}

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        self._steps += 1
        return self._shown[self._steps % len(self._shown)], self._reward, self._never, self._never, {}


def wide(size: int, num_envs: int | None = None) -> Wide | WideVector:
    """One, or a vectorised environment of `num_envs`."""
    return Wide(size) if num_envs is None else WideVector(size, num_envs)
