"""Pendulum-v1 in short episodes: recorded experience with continuous actions, for tests of learning from data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gymnasium as gym
import numpy as np

from rollout_worker.making import describe_environment
from shared.datasets.recording import Episode
from shared.fragment import EpisodeRecord
from shared.spaces import Array
from tests.conftest import minimal_config
from tests.shared.datasets import write_csv

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
    environment, found = gym.make("Pendulum-v1", max_episode_steps=STEPS), []
    for number in range(episodes):
        observation, _ = environment.reset(seed=number)
        observed, actions, chosen, rewards = [observation], [], [], []
        for _ in range(STEPS):
            action, log_prob = choose(observation)
            observation, reward, *_ = environment.step(action)
            observed.append(observation)
            actions.append(action)
            chosen.append(log_prob)
            rewards.append(float(reward))
        columns = {"obs": np.array(observed, np.float32)}, {"action": np.array(actions)}
        numbers = np.array(rewards, np.float32), np.array(chosen, np.float32)
        found.append(Episode(*columns, *numbers, False, EpisodeRecord(sum(rewards), STEPS)))
    environment.close()
    return found


def write_swung(path: Path, listed: list[Episode]) -> None:
    """As a CSV file."""
    config = minimal_config(environment={"id": "Pendulum-v1"})
    write_csv(path, describe_environment(config).policies["default"], listed)
