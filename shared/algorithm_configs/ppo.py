"""The configuration of PPO."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from shared.algorithm_configs.section import AlgorithmConfig, BatchOfUpdate
from shared.schedules import Schedule, ScheduleField


class PPOConfig(BatchOfUpdate, AlgorithmConfig):
    """Proximal policy optimisation (Schulman et al. 2017), clipped objective."""

    learns_from_others: ClassVar[bool] = False
    name: Literal["ppo"] = "ppo"
    """The algorithm."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """λ of generalised advantage estimation (Schulman et al. 2016)."""
    epochs: int = Field(10, ge=1)
    """Passes over each update's batch."""
    minibatch_size: int = Field(64, ge=1)
    """Transitions in one gradient step."""
    clip_range: ScheduleField = Schedule(start=0.2)
    """ε of the clipped objective; a number or a schedule."""
    clip_range_value: float | None = Field(None, gt=0)
    """Clip the change of the value prediction to ± this; off by default (it seldom helps)."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    value_coefficient: float = Field(0.5, ge=0)
    """Weight of the value loss."""
    max_grad_norm: float = Field(0.5, gt=0)
    """Gradients are scaled down to this norm."""
    normalise_advantages: bool = True
    """Zero mean, unit variance per minibatch."""
    target_kl: float | None = Field(None, gt=0)
    """Stop the epochs of an update once the approximate KL divergence exceeds 1.5 × this."""
    adam_epsilon: float = Field(1e-5, gt=0)
    """Adam's ε; 1e-5 as in the reference implementations."""
