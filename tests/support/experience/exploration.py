"""Policies, observations and explorations for tests of exploration."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from pydantic import TypeAdapter

from stagecoach.rollout_worker.acting_policies import make_exploration
from stagecoach.rollout_worker.exploration.base import Exploration
from stagecoach.shared.config.algorithms.exploration import ExplorationField, NoiseField
from stagecoach.shared.experience.counters import Counters
from tests.support.experience.policies import SIGHT, built_policy, generator

LOW, HIGH = np.array([-100.0, 0.0], np.float32), np.array([100.0, 400.0], np.float32)


ROWS, MANY = 4000, 20_000


TORQUE = spaces.Box(LOW, HIGH)


def policy_for(action: spaces.Space[Any] = TORQUE, algorithm: str = "") -> Any:
    """Returns a policy for three observed numbers: PPO's actor-critic, or TD3's actor for two torques."""
    return built_policy(SIGHT, action, algorithm or ("td3" if action is TORQUE else "ppo"), 0)


def q_network(**fields: Any) -> Any:
    return built_policy(SIGHT, spaces.Discrete(4), "dqn", 5, fields, hidden_sizes=(8,))


def exploring(counters: Counters | None = None, **section: Any) -> Exploration:
    kind: Any = NoiseField if section["kind"] in NOISES else ExplorationField
    return make_exploration(TypeAdapter(kind).validate_python(section), counters or Counters())


NOISES = ("gaussian", "truncated_gaussian", "ou", "parameter_noise")


def observations(rows: int) -> dict[str, torch.Tensor]:
    """Returns the same observations each time."""
    return {"obs": torch.randn(rows, 3, generator=generator(1))}


def alike(rows: int) -> dict[str, torch.Tensor]:
    return {"obs": observations(1)["obs"].expand(rows, -1)}
