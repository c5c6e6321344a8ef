"""Reward signals, and what they are to come to, worked out in NumPy a row at a time from their state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces as gym_spaces

from stagecoach.rollout_worker.environments.description import describe_space
from stagecoach.shared.config.algorithms.on_policy import PPOConfig
from stagecoach.shared.config.algorithms.reward_signals import GAILConfig, RNDConfig
from stagecoach.shared.config.recorded import DemonstrationsConfig
from stagecoach.shared.config.sections import PolicyConfig
from stagecoach.shared.datasets.read import read_dataset
from stagecoach.shared.experience.spaces import Array, Columns, EnvironmentDescription, PolicySpaces
from stagecoach.shared.policies.registry import borrowed_random_state, build_policies
from stagecoach.trainer_node.learning.building_blocks.demonstrations import Demonstrations
from stagecoach.trainer_node.learning.reward_signals.base import Rows
from stagecoach.trainer_node.learning.reward_signals.signals import GAIL, RND
from tests.support.experience.datasets import episodes, write_csv
from tests.support.learning.algorithms import CHOICE
from tests.support.learning.slow_returns import Case


def linear(arrays: Columns, name: str, inputs: Array) -> Array:
    found: Array = arrays[f"{name}.weight"].astype(np.float64) @ inputs + arrays[f"{name}.bias"]
    return found


def mlp(arrays: Columns, prefix: str, inputs: Array, activation: str) -> Array:
    """One row through an encoder of two layers at most and a head, float64."""
    apply: dict[str, Any] = {"tanh": np.tanh, "relu": lambda x: np.maximum(x, 0.0)}
    for layer in (0, 2, 4):
        if f"{prefix}encoder.mlp.{layer}.weight" in arrays:
            inputs = apply[activation](linear(arrays, f"{prefix}encoder.mlp.{layer}", inputs))
    return linear(arrays, f"{prefix}head", inputs)


def normalized(arrays: Columns, prefix: str, observation: Array, bound: float = 5.0) -> Array:
    """Normalizes by the statistics, clipped to so many standard deviations."""
    count, mean, m2 = (arrays[f"{prefix}normalizer.moments.0.{name}"] for name in ("count", "mean", "m2"))
    found: Array = np.clip((observation - mean) / np.sqrt(m2 / count + 1e-8), -bound, bound)
    return found


def next_observation(columns: Columns, step: int, slot: int) -> Array:
    for number, (t, s) in enumerate(columns["final_index"]):
        if (t, s) == (step, slot):
            final: Array = columns["final_obs"][number]
            return final
    after = np.concatenate([columns["obs"], columns["bootstrap_obs"][None]])
    return np.asarray(after[step + 1, slot])


def ends(columns: Columns, episodic: bool) -> Array:
    """`[T, S]`: whether a signal's return ends with the step."""
    acts_next = np.append(columns["mask"][1:], np.ones_like(columns["mask"][:1]), axis=0)
    found: Array = (columns["terminated"] | columns["truncated"]) & (episodic | ~acts_next)
    return found


def scaled(columns: Columns, reward: Array, gamma: float, episodic: bool) -> Array:
    """Divided by the deviation of all discounted returns, within ± 10."""
    returns, running = [], np.zeros(reward.shape[1])
    for step, ended in enumerate(ends(columns, episodic)):
        running = gamma * running + reward[step]
        returns += running[columns["mask"][step]].tolist()
        running = np.where(ended, 0.0, running)
    found: Array = np.clip(reward / np.sqrt(np.var(returns) + 1e-8), -10.0, 10.0)
    return found


def case_of(columns: Columns, reward: Array, value: Any, episodic: bool, **numbers: float) -> Case:
    """Arguments of the slow estimators, without ratios; `value` is a function of one observation."""
    ended = ends(columns, episodic)
    finals = {(int(t), int(s)): value(seen) for (t, s), seen in zip(columns["final_index"], columns["final_obs"])}
    values, bootstrap = (np.apply_along_axis(value, -1, columns[name]) for name in ("obs", "bootstrap_obs"))
    terminated, truncated = columns["terminated"] & ended, columns["truncated"] & ended
    none = np.zeros(reward.shape)
    return Case(none, reward, values, bootstrap, terminated, truncated, columns["mask"], finals, **numbers)


_LOW, _HIGH = np.array([-2.0, 0.0, -np.inf], np.float32), np.array([2.0, 4.0, np.inf], np.float32)
UNBOUNDED = PolicySpaces(describe_space(gym_spaces.Box(-5.0, 5.0, (3,))), describe_space(gym_spaces.Box(_LOW, _HIGH)))
"""The last element of its actions has no bounds."""


def shown(path: Path, described: PolicySpaces) -> Demonstrations:
    """Made-up demonstrations, read from a file."""
    write_csv(path, described, episodes(described, (9, 12, 8), "tTc"))
    description = EnvironmentDescription({"agent": "default"}, {"default": described})
    config = DemonstrationsConfig(path=str(path))
    return Demonstrations(lambda: read_dataset(config, description), "default", lambda columns: columns, 8)


def make_gail(tmp_path: Path, described: PolicySpaces = CHOICE, **config: Any) -> GAIL:
    policy = build_policies({"p": described}, {"p": PolicyConfig()}, PPOConfig(), 1)["p"]
    section = GAILConfig.model_validate({"hidden_sizes": (6, 5), **config})
    with borrowed_random_state(1):
        return GAIL(policy, section, shown(tmp_path / "shown.csv", described))


def pairs(described: PolicySpaces = CHOICE) -> Rows:
    random, count = np.random.default_rng(0), 7
    seen = torch.from_numpy(random.normal(size=(count, 3)).astype(np.float32))
    done = random.integers(4, size=count) if described is CHOICE else random.normal(0, 3, (count, 3))
    action = torch.from_numpy(done if described is CHOICE else done.astype(np.float32))
    return Rows({"obs": seen}, {"action": action}, {"obs": seen})


def make_rnd() -> RND:
    policy = build_policies({"p": CHOICE}, {"p": PolicyConfig()}, PPOConfig(), 1)["p"]
    with borrowed_random_state(1):
        return RND(policy, RNDConfig(hidden_sizes=(8, 8), embedding_size=4))


def transitions() -> Rows:
    random, count = np.random.default_rng(0), 9
    here, there = (torch.from_numpy(random.normal(size=(count, 3)).astype(np.float32)) for _ in range(2))
    return Rows({"obs": here}, {"action": torch.zeros(count, dtype=torch.int64)}, {"obs": there})
