"""Environments to measure with: images that cost next to nothing, observations of any width, steps of any length."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from stagecoach.shared.experience.spaces import Array

SIDE, SQUARE, EPISODE_STEPS = 84, 12, 200
_STRIDE = 3
_TAKES = 4
_MOST_FLOATS = 1 << 21
"""Of recorded observations, all together."""


class MovingSquare(gym.Env[Array, Any]):
    """A bright square walks at random; whether it is left or right of the middle says which action is rewarded.

    Observations: one frame `[84, 84]` of bytes; actions: 4, of which two count. Episodes last 200 steps.
    """

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(0, 255, (SIDE, SIDE), np.uint8)
        self.action_space = gym.spaces.Discrete(4)
        self._place = np.zeros(2, np.int64)
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        self._place = self.np_random.integers(0, SIDE - SQUARE, 2)
        self._steps = 0
        return self._frame(), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        right = self._place[1] > (SIDE - SQUARE) // 2
        self._place = np.clip(self._place + self.np_random.integers(-_STRIDE, _STRIDE + 1, 2), 0, SIDE - SQUARE)
        self._steps += 1
        return self._frame(), float(int(action) == int(right)), self._steps >= EPISODE_STEPS, False, {}

    def _frame(self) -> Array:
        frame = np.zeros((SIDE, SIDE), np.uint8)
        row, column = self._place
        frame[row : row + SQUARE, column : column + SQUARE] = 255
        return frame


def moving_square() -> MovingSquare:
    """For `environment.id`."""
    return MovingSquare()


class Slow(gym.Wrapper[Any, Any, Any, Any]):
    """Sleeps `seconds` in each step, as an environment that waits for a simulator or a network."""

    def __init__(self, env: gym.Env[Any, Any], seconds: float) -> None:
        super().__init__(env)
        self._seconds = seconds

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        time.sleep(self._seconds)
        return self.env.step(action)


def slow(seconds: float) -> Slow:
    """For `environment.id`."""
    return Slow(gym.make("CartPole-v1"), seconds)


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
    """One, or a vectorized environment of `num_envs`."""
    return Wide(size) if num_envs is None else WideVector(size, num_envs)
