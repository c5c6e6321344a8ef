"""Environments of the kit's own."""

from __future__ import annotations

from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np

_KEPT = 1000


class ShuffledRewards(gym.Wrapper[Any, Any, Any, Any]):
    """Gives each step the reward of a step that was drawn from the last thousand: none says what an action was worth.

    That takes a task whose episodes all have the same length, else the number of steps would still say something.
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self._seen: list[float] = []
        self._at = 0
        self._draw = np.random.default_rng(0)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self._draw = np.random.default_rng(seed)
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        if len(self._seen) < _KEPT:
            self._seen.append(float(reward))
        else:
            self._seen[self._at % _KEPT] = float(reward)
        self._at += 1
        return observation, self._seen[self._draw.integers(len(self._seen))], terminated, truncated, info


def shuffled_rewards(id: str, shuffled: bool = True) -> gym.Env[Any, Any]:
    """A registered environment with its rewards shuffled; without, it is as it is (for the evaluation)."""
    environment = gym.make(id)
    return ShuffledRewards(environment) if shuffled else environment
