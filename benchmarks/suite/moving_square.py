"""An image environment that costs next to nothing: a bright square walks at random over an 84×84 frame.

So what is measured is the way of images through the system (drawing, stacking, sending, storing, learning), and no
emulator. Whether the square is left or right of the middle says which action is rewarded.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from shared.spaces import Array

SIDE, SQUARE, EPISODE_STEPS = 84, 12, 200
_STRIDE = 3


class MovingSquare(gym.Env[Array, Any]):
    """Observations: one frame `[84, 84]` of bytes; actions: 4, of which two count. Episodes last 200 steps."""

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


def make() -> MovingSquare:
    """For `environment.id`."""
    return MovingSquare()
