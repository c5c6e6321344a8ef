"""How fast environments step and policies act, alone and together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from coordinator.preparation import check
from rollout_worker.environments import make_vector
from rollout_worker.exploration import Sampling
from rollout_worker.sampler import Sampler
from rollout_worker.trail import Life
from shared.config import Config
from shared.config_sources import parse_config
from shared.policies.policy import Policy
from shared.policies.registry import build_policies

ENVIRONMENTS, STEPS = 64, 64


@dataclass(frozen=True)
class Work:
    """One line: what is done again and again."""

    what: str
    unit: str
    call: Callable[[], int]
    """Does some of it; answers how much."""
    against: str = ""
    """`what` of the line that it is compared with."""
    close: Callable[[], object] = lambda: None


def cartpole(quick: bool = False) -> Config:
    """64 environments × 64 steps to a fragment, PPO with 4 epochs; little of it where it is only tried out."""
    some = 1 if quick else 4
    return parse_config({
        "environment": {"id": "CartPole-v1", "num_envs": ENVIRONMENTS},
        "policies": {"default": {"hidden_sizes": [64, 64]}},
        "algorithm": {"epochs": some, "minibatch_size": 512},
        "rollout": {"fragment_steps": STEPS, "fragments_per_update": some, "max_policy_lag": 1, "workers": 1},
        "stop_at": {"updates": 10**9},
    })  # fmt: skip


def works() -> list[Work]:
    """All of them, ready."""
    unit, vector = "env steps/s", f"gymnasium SyncVectorEnv of {ENVIRONMENTS}"
    sync = gym.make_vec("CartPole-v1", ENVIRONMENTS, vectorization_mode="sync")
    own = {count: gym.make_vec("CartPole-v1", count, vectorization_mode="vector_entry_point") for count in (64, 1024)}
    single = gym.make("CartPole-v1")
    sampler, policy = _sampler()
    return [
        Work("CartPole-v1, one", unit, _one_by_one(single), close=single.close),
        Work(vector, unit, _vector(sync, ENVIRONMENTS), close=sync.close),
        *(
            Work(f"gymnasium's own vector CartPole of {count}", unit, _vector(env, count), vector, env.close)
            for count, env in own.items()
        ),
        Work("policy: forward and draw, batch 64", "rows/s", _acting(policy)),
        Work(f"our sampler, {ENVIRONMENTS} environments and policy", unit, lambda: _sampled(sampler, policy), vector,
             sampler.close),
    ]  # fmt: skip


def _one_by_one(env: gym.Env[Any, Any]) -> Callable[[], int]:
    """Random actions, with resets, as who steps an environment by hand."""
    actions = np.random.default_rng(1).integers(0, 2, 1000).tolist()
    env.reset(seed=1)

    def call() -> int:
        for action in actions:
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()
        return len(actions)

    return call


def _vector(env: gym.vector.VectorEnv[Any, Any, Any], count: int) -> Callable[[], int]:
    """Random actions; it resets by itself, and a step in which a copy resets counts as one."""
    actions = np.random.default_rng(1).integers(0, 2, (50, count))
    env.reset(seed=1)

    def call() -> int:
        for row in actions:
            env.step(row)
        return len(actions) * count

    return call


def _acting(policy: Policy) -> Callable[[], int]:
    observations = {"obs": torch.randn(ENVIRONMENTS, 4)}
    generator = torch.Generator().manual_seed(1)

    def call() -> int:
        with torch.inference_mode():
            for _ in range(50):
                draw(policy, observations, generator)
        return 50 * ENVIRONMENTS

    return call


def draw(policy: Policy, observations: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Forward and draw."""
    return policy.distribution.sample(policy.action_parameters(observations), generator)


def _sampler() -> tuple[Sampler, Policy]:
    config = cartpole()
    description = check(config)
    (policy,) = build_policies(description.policies, config.policies, config.algorithm, seed=1).values()
    sampler = Sampler(make_vector(config.environment, description), description, Life(1, 0, 0, 0))
    return sampler, policy


def _sampled(sampler: Sampler, policy: Policy) -> int:
    sampler.sample({"default": policy}, Sampling(), STEPS)
    return ENVIRONMENTS * STEPS
