"""CartPole-v1 as a simple rule plays it: recorded experience of good return, for tests of learning from data."""

from __future__ import annotations

from pathlib import Path

import gymnasium as gym
import numpy as np

from stagecoach.shared.datasets.recording import Episode
from stagecoach.shared.experience.spaces import Array
from tests.support.experience.datasets import recorded, write_recorded

RULE = np.array([0.1, 0.3, 1.0, 1.0])
"""Push to the right where the weighted sum of what is observed is positive."""


def played(episodes: int, greed: float = 1.0, steps: int = 500, seed: int = 0) -> list[Episode]:
    """Episodes of that many steps at most; the rule is followed with probability (1 + greed) / 2."""
    generator = np.random.default_rng(seed)

    def choose(observation: Array) -> tuple[int, float]:
        right = 0.5 + 0.5 * greed * np.sign(observation @ RULE)
        action = int(generator.random() < right)
        return action, float(np.log(right if action else 1 - right))

    return recorded(gym.make("CartPole-v1", max_episode_steps=steps), choose, episodes, seed * 1000)


def write_played(path: Path, listed: list[Episode]) -> None:
    write_recorded(path, "CartPole-v1", listed)
