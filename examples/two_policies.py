"""Two agents with different action spaces, given to Stagecoach as `module:factory`: a chaser and a runner on a ring."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

Numbers = np.ndarray[Any, Any]


class Ring(ParallelEnv[str, Numbers, Any]):  # type: ignore[misc]
    """The chaser steps left, stays, or steps right (0.15); the runner moves by any distance up to 0.1.

    Both see the runner's place relative to the chaser's, in [-1, 1). The chaser is paid for being near and the runner
    for being far; the chaser has caught the runner within 0.1, which ends the episode.
    """

    metadata = {"name": "ring"}
    possible_agents = ["chaser", "runner"]

    def __init__(self, length: int = 50) -> None:
        self._length = length
        self._actions = {"chaser": spaces.Discrete(3), "runner": spaces.Box(-0.1, 0.1, (1,), np.float32)}

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(-1.0, 1.0, (1,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self._actions[agent]

    def _observed(self) -> dict[str, Numbers]:
        return {agent: np.array([self._apart], np.float32) for agent in self.possible_agents}

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Numbers], dict[str, Any]]:
        self.agents = list(self.possible_agents)
        self._apart, self._steps = float(np.random.default_rng(seed).uniform(-1.0, 1.0)), 0
        return self._observed(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        self._steps += 1
        moved = self._apart + float(actions["runner"][0]) - 0.15 * (int(actions["chaser"]) - 1)
        self._apart = (moved + 1.0) % 2.0 - 1.0
        far = abs(self._apart)
        caught, late = far < 0.1, self._steps >= self._length
        self.agents = [] if caught or late else self.agents
        both = self.possible_agents
        reward = {"chaser": 5.0 * caught - far, "runner": far - 5.0 * caught}
        return self._observed(), reward, dict.fromkeys(both, caught), dict.fromkeys(both, late), {a: {} for a in both}


def make(length: int = 50) -> Ring:
    """The factory that the config names."""
    return Ring(length)
