"""CartPole that takes its time: each step sleeps, as an environment does that waits for a simulator or a network."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym


class Slow(gym.Wrapper[Any, Any, Any, Any]):
    """Sleeps `seconds` in each step."""

    def __init__(self, env: gym.Env[Any, Any], seconds: float) -> None:
        super().__init__(env)
        self._seconds = seconds

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        time.sleep(self._seconds)
        return self.env.step(action)


def make(seconds: float) -> Slow:
    """For `environment.id`."""
    return Slow(gym.make("CartPole-v1"), seconds)
