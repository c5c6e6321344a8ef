"""An environment with Atari's images and a fixed price of a step, without a ROM. Only gymnasium and NumPy: it is
stepped in the virtual environments of others.

Observations are the last four frames, `[4, 84, 84]` of bytes; there are 4 actions, and episodes last 200 steps. A step
costs what an emulator's would, whoever asks for it: a checksum over the four screens of 210 × 160 × 3 bytes that an
agent's step with a frame skip of four draws, some 0.2 ms.
"""

from __future__ import annotations

import zlib
from typing import Any

import gymnasium as gym
import numpy as np

STACK, SIDE, EPISODE_STEPS = 4, 84, 200
_BANK = 64
"""Frames that are shown in turns, from a place that the action moves."""
_SCREENS = bytes(4 * 210 * 160 * 3)


class Images(gym.Env[Any, Any]):
    """One game; the reward is 1 for the action that the frame's number asks for."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(0, 255, (STACK, SIDE, SIDE), np.uint8)
        self.action_space = gym.spaces.Discrete(4)
        self._bank = np.random.default_rng(0).integers(0, 256, (_BANK, SIDE, SIDE), np.uint8)
        self._place, self._steps = 0, 0
        self._shown = np.zeros((STACK, SIDE, SIDE), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """All four frames are the same one."""
        super().reset(seed=seed)
        self._place, self._steps = int(self.np_random.integers(_BANK)), 0
        self._shown[:] = self._bank[self._place]
        return self._shown.copy(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """The oldest frame makes room for a new one."""
        zlib.crc32(_SCREENS)
        reward = float(int(action) == self._place % 4)
        self._place = (self._place + 1 + int(action)) % _BANK
        self._shown[:-1] = self._shown[1:]
        self._shown[-1] = self._bank[self._place]
        self._steps += 1
        return self._shown.copy(), reward, False, self._steps >= EPISODE_STEPS, {}


def make() -> Images:
    """For `environment.id`."""
    return Images()


def environment(name: str) -> gym.Env[Any, Any]:
    """The environment that a program of the contest is told to train in: a registered id, or `images`."""
    return Images() if name == "images" else gym.make(name)
