"""Pendulum-v1 in short episodes: recorded experience with continuous actions, for tests of learning from data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gymnasium as gym
import numpy as np

from shared.datasets.recording import Episode
from shared.experience.spaces import Array
from tests.support.datasets import recorded, write_recorded

STEPS = 30
"""Of an episode; then it is cut off."""

Choose = Callable[[Array], tuple[Array, float]]
"""Observation → action, and the log density that it was chosen with."""


def uniform(seed: int = 0) -> Choose:
    """Chooses any torque alike."""
    generator = np.random.default_rng(seed)
    return lambda _: (generator.uniform(-2, 2, 1).astype(np.float32), float(-np.log(4.0)))


def swung(episodes: int, choose: Choose) -> list[Episode]:
    """Each from a start of its own."""
    return recorded(gym.make("Pendulum-v1", max_episode_steps=STEPS), choose, episodes)


def write_swung(path: Path, listed: list[Episode]) -> None:
    """As a CSV file."""
    write_recorded(path, "Pendulum-v1", listed)
