"""Policies as a run builds them, and random observations as the sampler hands them over."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from stagecoach.rollout_worker.environments.description import describe_space
from stagecoach.shared.config.algorithms.registry import ALGORITHMS
from stagecoach.shared.config.sections import PolicyConfig
from stagecoach.shared.experience.spaces import PolicySpaces
from stagecoach.shared.policies.registry import build_policies

SIGHT = spaces.Box(-1.0, 1.0, (3,), np.float32)
Q_NETWORKS: list[dict[str, Any]] = [
    {},
    {"dueling": True},
    {"noisy": True},
    {"head": "c51", "atoms": 5, "v_min": -2.0, "v_max": 2.0},
    {"head": "qr", "quantiles": 4, "dueling": True},
    {"head": "c51", "atoms": 3, "v_min": 0.0, "v_max": 4.0, "dueling": True, "noisy": True},
    {"heads": 3},
    {"heads": 2, "head": "c51", "atoms": 3, "v_min": 0.0, "v_max": 4.0, "dueling": True},
    {"heads": 2, "head": "qr", "quantiles": 4, "prior_scale": 2.0},
]


def built_policy(
    observation: spaces.Space[Any], action: spaces.Space[Any], algorithm: str = "ppo", seed: int = 1,
    fields: dict[str, Any] | None = None, **policy: Any,
) -> Any:  # fmt: skip
    """An untrained policy of this algorithm, whose config has these `fields`, for these spaces."""
    described = PolicySpaces(describe_space(observation), describe_space(action))
    config = ALGORITHMS[algorithm].model_validate({"name": algorithm, **(fields or {})})
    return build_policies({"p": described}, {"p": PolicyConfig.model_validate(policy)}, config, seed)["p"]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch_of(space: spaces.Space[Any], rows: int) -> dict[str, torch.Tensor]:
    """Random observations as the sampler hands them to a policy."""
    space.seed(7)
    spec = describe_space(space)
    samples = [spec.flatten("obs", space.sample()) for _ in range(rows)]
    return {name: torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in samples[0]}
