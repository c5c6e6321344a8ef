"""CartPole-v1 as a simple rule plays it: recorded experience of good return, for tests of learning from data."""

from __future__ import annotations

from pathlib import Path

import gymnasium as gym
import numpy as np

from rollout_worker.making import describe_environment
from shared.config import Config
from shared.datasets.recording import Episode
from shared.fragment import EpisodeRecord
from shared.spaces import Array
from tests.conftest import minimal_config
from tests.shared.datasets import write_csv

RULE = np.array([0.1, 0.3, 1.0, 1.0])
"""Push to the right where the weighted sum of what is observed is positive."""


def rule_probability(observations: Array, greed: float) -> Array:
    """`[B]`: of pushing to the right; the rule is followed with probability (1 + greed) / 2."""
    return np.asarray(0.5 + 0.5 * greed * np.sign(observations @ RULE))


def played(episodes: int, greed: float = 1.0, steps: int = 500, seed: int = 0) -> list[Episode]:
    """Episodes of that many steps at most, with the log-probabilities that the actions were chosen with."""
    environment, generator, found = gym.make("CartPole-v1", max_episode_steps=steps), np.random.default_rng(seed), []
    for number in range(episodes):
        observation, _ = environment.reset(seed=seed * 1000 + number)
        observed, actions, rewards, chosen, terminated, truncated = [observation], [], [], [], False, False
        while not (terminated or truncated):
            right = rule_probability(observation, greed)
            action = int(generator.random() < right)
            observation, reward, terminated, truncated, _ = environment.step(action)
            observed.append(observation)
            actions.append(action)
            rewards.append(float(reward))
            chosen.append(np.log(right if action else 1 - right))
        columns = {"obs": np.array(observed, np.float32)}, {"action": np.array(actions, np.int64)}
        record = EpisodeRecord(sum(rewards), len(rewards))
        numbers = np.array(rewards, np.float32), np.array(chosen, np.float32)
        found.append(Episode(*columns, *numbers, terminated, record))
    environment.close()
    return found


def write_played(path: Path, listed: list[Episode]) -> None:
    """As a CSV file."""
    config: Config = minimal_config()
    write_csv(path, describe_environment(config).policies["default"], listed)
