"""Reward signals, and what they are to come to, worked out in NumPy a row at a time from their state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces as gym_spaces

from rollout_worker.environments.description import describe_space
from shared.config.algorithms.on_policy import GAILConfig, PPOConfig, RNDConfig
from shared.config.sections import DemonstrationsConfig, PolicyConfig
from shared.datasets.read import read_dataset
from shared.experience.spaces import Array, Columns, EnvironmentDescription, PolicySpaces
from shared.policies.registry import borrowed_random_state, build_policies
from tests.support.datasets import episodes, write_csv
from tests.support.learning.algorithms import CHOICE
from trainer_node.learning.demonstrations import Demonstrations
from trainer_node.learning.reward_signals.base import Rows
from trainer_node.learning.reward_signals.signals import GAIL, RND


def mlp(arrays: Columns, prefix: str, inputs: Array, activation: str) -> Array:
    """One row through an encoder of two layers at most and a head, float64."""
    apply: dict[str, Any] = {"tanh": np.tanh, "relu": lambda x: np.maximum(x, 0.0)}
    for layer in (0, 2, 4):
        if f"{prefix}encoder.mlp.{layer}.weight" in arrays:
            weight, bias = (arrays[f"{prefix}encoder.mlp.{layer}.{part}"] for part in ("weight", "bias"))
            inputs = apply[activation](weight.astype(np.float64) @ inputs + bias)
    found: Array = arrays[f"{prefix}head.weight"].astype(np.float64) @ inputs + arrays[f"{prefix}head.bias"]
    return found


def normalized(arrays: Columns, prefix: str, observation: Array) -> Array:
    """As statistics say, within 5 standard deviations."""
    count, mean, m2 = (arrays[f"{prefix}normalizer.moments.0.{name}"] for name in ("count", "mean", "m2"))
    found: Array = np.clip((observation - mean) / np.sqrt(m2 / count + 1e-8), -5.0, 5.0)
    return found


def next_observation(columns: Columns, step: int, slot: int) -> Array:
    """Where the step led."""
    for number, (t, s) in enumerate(columns["final_index"]):
        if (t, s) == (step, slot):
            final: Array = columns["final_obs"][number]
            return final
    after = np.concatenate([columns["obs"], columns["bootstrap_obs"][None]])
    return np.asarray(after[step + 1, slot])


def ends_here(columns: Columns, step: int, slot: int, episodic: bool) -> bool:
    """Whether a signal's return ends with this step."""
    over = columns["terminated"][step, slot] or columns["truncated"][step, slot]
    goes_on = step + 1 == len(columns["mask"]) or columns["mask"][step + 1, slot]
    return bool(over and (episodic or not goes_on))


def scaled(columns: Columns, reward: Array, gamma: float, episodic: bool) -> Array:
    """Divided by the deviation of all discounted returns, within ± 10."""
    returns = []
    for slot in range(reward.shape[1]):
        running = 0.0
        for step in range(len(reward)):
            running = gamma * running + reward[step, slot]
            if columns["mask"][step, slot]:
                returns.append(running)
            if ends_here(columns, step, slot, episodic):
                running = 0.0
    found: Array = np.clip(reward / np.sqrt(np.var(returns) + 1e-8), -10.0, 10.0)
    return found


def advantages(
    columns: Columns,
    reward: Array,
    value: Any,
    *,
    gamma: float,
    decay: float,
    episodic: bool,
    ratio: Array | None = None,
) -> tuple[Array, Array]:
    """Advantages and targets `[T, S]`: GAE (Schulman et al. 2016, eq. 16), or V-trace (Espeholt et al. 2018, eq. 1).

    `value` is a function of one observation.
    """
    advantage, target = np.zeros(reward.shape), np.zeros(reward.shape)
    for slot in range(reward.shape[1]):
        running = 0.0  # GAE's sum, or v − V of the step after
        for step in reversed(range(len(reward))):
            here = value(columns["obs"][step, slot])
            target[step, slot] = here
            if not columns["mask"][step, slot]:
                running = 0.0
                continue
            ends = ends_here(columns, step, slot, episodic)
            if ends:
                running = 0.0
                follows = 0.0 if columns["terminated"][step, slot] else value(next_observation(columns, step, slot))
            elif step + 1 < len(reward):
                follows = value(columns["obs"][step + 1, slot])
            else:
                follows = value(columns["bootstrap_obs"][slot])
            error = reward[step, slot] + gamma * follows - here
            if ratio is None:
                running = advantage[step, slot] = error + gamma * decay * running
            else:
                advantage[step, slot] = error + gamma * running
                bounded = min(1.0, ratio[step, slot])
                running = bounded * error + gamma * decay * bounded * running
            target[step, slot] = here + running
    return advantage, target


_LOW, _HIGH = np.array([-2.0, 0.0, -np.inf], np.float32), np.array([2.0, 4.0, np.inf], np.float32)
UNBOUNDED = PolicySpaces(describe_space(gym_spaces.Box(-5.0, 5.0, (3,))), describe_space(gym_spaces.Box(_LOW, _HIGH)))
"""The last element of its actions has no bounds."""


def shown(path: Path, described: PolicySpaces) -> Demonstrations:
    """Made-up demonstrations, read from a file."""
    write_csv(path, described, episodes(described, (9, 12, 8), "tTc"))
    description = EnvironmentDescription({"agent": "default"}, {"default": described})
    config = DemonstrationsConfig(path=str(path))
    return Demonstrations(lambda: read_dataset(config, description), lambda columns: columns, 8)


def make_gail(tmp_path: Path, described: PolicySpaces = CHOICE, **config: Any) -> GAIL:
    """Untrained."""
    policy = build_policies({"p": described}, {"p": PolicyConfig()}, PPOConfig(), 1)["p"]
    section = GAILConfig.model_validate({"hidden_sizes": (6, 5), **config})
    with borrowed_random_state(1):
        return GAIL(policy, section, shown(tmp_path / "shown.csv", described))


def pairs(described: PolicySpaces = CHOICE, seed: int = 0, count: int = 7, middle: float = 0.0) -> Rows:
    """What was observed and done."""
    random = np.random.default_rng(seed)
    seen = torch.from_numpy(random.normal(middle, 1.0, (count, 3)).astype(np.float32))
    done = random.integers(4, size=count) if described is CHOICE else random.normal(0, 3, (count, 3))
    action = torch.from_numpy(done if described is CHOICE else done.astype(np.float32))
    return Rows({"obs": seen}, {"action": action}, {"obs": seen})


def make_rnd(seed: int = 1) -> RND:
    """Untrained."""
    config = PPOConfig()
    policy = build_policies({"p": CHOICE}, {"p": PolicyConfig()}, config, seed)["p"]
    with borrowed_random_state(seed):
        return RND(policy, RNDConfig(hidden_sizes=(8, 8), embedding_size=4))


def transitions(seed: int = 0, count: int = 9, middle: float = 0.0) -> Rows:
    """Observations and what follows them."""
    random = np.random.default_rng(seed)
    here, there = (torch.from_numpy(random.normal(middle, 1.0, (count, 3)).astype(np.float32)) for _ in range(2))
    return Rows({"obs": here}, {"action": torch.zeros(count, dtype=torch.int64)}, {"obs": there})
