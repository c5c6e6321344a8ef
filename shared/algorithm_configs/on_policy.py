"""Fields that algorithms learning an actor-critic from the batch of each update have in common."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from shared.algorithm_configs.cloning import Cloning
from shared.algorithm_configs.section import BatchOfUpdate
from shared.reward_signals_config import RewardSignalsConfig
from shared.schedules import Schedule, ScheduleField
from shared.section import Section


class OnPolicyConfig(Cloning):
    """What all of them have."""

    learns_from_others: ClassVar[bool] = False
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    value_coefficient: float = Field(0.5, ge=0)
    """Weight of the value loss."""
    max_grad_norm: float = Field(0.5, gt=0)
    """Gradients are scaled down to this norm."""
    adam_epsilon: float = Field(1e-5, gt=0)
    """Adam's ε; 1e-5 as in the reference implementations."""
    reward_signals: RewardSignalsConfig | None = None
    """Rewards beside the environment's, for tasks whose own are rare; none by default."""

    @property
    def imitating(self) -> tuple[str, ...]:
        """By cloning, and by a reward signal."""
        gail = self.reward_signals is not None and self.reward_signals.gail is not None
        return super().imitating + (("reward_signals.gail",) if gail else ())


class ClippedConfig(BatchOfUpdate, OnPolicyConfig):
    """What those with the clipped objective have: several passes over each batch."""

    epochs: int = Field(10, ge=1)
    """Passes over each update's batch."""
    minibatch_size: int = Field(64, ge=1)
    """Transitions in one gradient step."""
    clip_range: ScheduleField = Schedule(start=0.2)
    """ε of the clipped objective; a number or a schedule."""
    clip_range_value: float | None = Field(None, gt=0)
    """Clip the change of the value prediction to ± this; off by default (it seldom helps)."""
    normalise_advantages: bool = True
    """Zero mean, unit variance per minibatch."""
    target_kl: float | None = Field(None, gt=0)
    """Stop the epochs of an update once the approximate KL divergence of the policy from what it was when the update
    began exceeds 1.5 × this; not from the policy that acted, which may be older (`rollout.max_policy_lag`)."""


class VTraceConfig(Section):
    """What those with V-trace's targets have."""

    vtrace_lambda: float = Field(1.0, ge=0, le=1)
    """λ of V-trace (Espeholt et al. 2018, remark 2); 1 as in the paper."""
    rho_bar: float = Field(1.0, gt=0)
    """ρ̄: the weight of a transition is never more; decides which policy the values are of."""
    c_bar: float = Field(1.0, gt=0)
    """c̄: what later transitions weigh on earlier ones is never more; decides how fast the values are learnt."""
