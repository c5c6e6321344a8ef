"""The configuration of IQL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from shared.algorithm_configs.off_policy import LARGE_NETWORK, OffPolicyConfig
from shared.memory_config import MemoryField, UniformMemory


class IQLConfig(OffPolicyConfig):
    """Implicit Q-learning (Kostrikov et al. 2022): learns from data without asking for actions that are not in them."""

    defaults: ClassVar[Mapping[str, Any]] = {"policies": LARGE_NETWORK, "rollout": {"max_policy_lag": 1}}
    name: Literal["iql"]
    """The algorithm."""
    memory: MemoryField = UniformMemory(capacity=1_000_000)
    """What is learnt from; a million transitions are a whole dataset of the usual size."""
    expectile: float = Field(0.7, ge=0.5, lt=1)
    """τ of the value's regression: at 0.5 it is the mean over the data's actions, towards 1 their best."""
    inverse_temperature: float = Field(3.0, ge=0)
    """β: how much better actions count more in the policy's regression; 0 is behavioural cloning."""
    largest_weight: float = Field(100.0, gt=0)
    """Bound of an action's weight, exp(β · advantage)."""
    target_rate: float = Field(0.005, gt=0, le=1)
    """How far the target critics move towards the critics with each gradient step."""
    minibatch_size: int = Field(256, ge=1)
    """Transitions in one gradient step."""
    gradient_steps_per_env_step: float = Field(0.1, gt=0, le=1000)
    """Gradient steps for each env step read. With minibatches of 256, 0.1 uses a transition some 25 times an epoch."""
