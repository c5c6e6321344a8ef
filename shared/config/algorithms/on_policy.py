"""The configurations of PPO, A2C, APPO and IMPALA."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from stagecoach.shared.config.algorithms.base import BatchOfUpdate, Signals
from stagecoach.shared.config.schema.section import Schedule, ScheduleField, Section


class OnPolicyConfig(Signals):
    """The fields that all of them have."""

    learns_from_others: ClassVar[bool] = False
    recurrent_policy: ClassVar[str | None] = "recurrent_actor_critic"
    entropy_coefficient: ScheduleField = Schedule(start=0.0)
    """Weight of the entropy bonus; a number or a schedule."""
    value_coefficient: float = Field(0.5, ge=0)
    """Weight of the value loss."""
    max_grad_norm: float = Field(0.5, gt=0)
    """Gradients are scaled down to this norm."""
    adam_epsilon: float = Field(1e-5, gt=0)
    """Adam's ε; 1e-5 as in the reference implementations."""
    normalize_values: bool = False
    """The critic predicts returns less their running mean, in units of their running deviation, as in MAPPO (Yu et al.
    2022): for returns that are large or grow. Advantages stay in the environment's units."""

    def network(self) -> dict[str, Any]:
        """Whether the policy has a scale of values."""
        return {"normalize_values": True} if self.normalize_values else {}


class ClippedConfig(BatchOfUpdate, OnPolicyConfig):
    """The fields of the clipped objective: several passes over each batch."""

    epochs: int = Field(10, ge=1)
    """Passes over each update's batch."""
    clip_range: ScheduleField = Schedule(start=0.2)
    """ε of the clipped objective; a number or a schedule."""
    clip_range_value: float | None = Field(None, gt=0)
    """Clip the change of the value prediction to ± this; off by default (it seldom helps)."""
    normalize_advantages: bool = True
    """Zero mean, unit variance per minibatch."""
    target_kl: float | None = Field(None, gt=0)
    """End an update's epochs once the approximate KL divergence from the policy it began with exceeds 1.5 × this."""


class VTraceConfig(Section):
    """The fields of V-trace's targets."""

    vtrace_lambda: float = Field(1.0, ge=0, le=1)
    """λ of V-trace (Espeholt et al. 2018, remark 2); 1 as in the paper."""
    rho_bar: float = Field(1.0, gt=0)
    """ρ̄: the weight of a transition is never more; decides which policy the values are of."""
    c_bar: float = Field(1.0, gt=0)
    """c̄: what later transitions weigh on earlier ones is never more; decides how fast the values are learned."""


class PPOConfig(ClippedConfig):
    """Proximal policy optimization (Schulman et al. 2017), clipped objective."""

    learner: ClassVar[str] = "stagecoach.trainer_node.learning.algorithms.ppo:PPO"
    name: str = "ppo"
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """λ of generalized advantage estimation (Schulman et al. 2016)."""


class A2CConfig(OnPolicyConfig):
    """Advantage actor-critic: A3C (Mnih et al. 2016) in lockstep, one gradient step for each update."""

    learner: ClassVar[str] = "stagecoach.trainer_node.learning.algorithms.a2c:A2C"
    corrects_policy_lag: ClassVar[bool] = False
    name: str = "a2c"
    learning_rate: ScheduleField = Schedule(start=7e-4)
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """λ of generalized advantage estimation; 1 is the n-step return of the paper."""
    normalize_advantages: bool = False
    """Zero mean, unit variance per batch."""


class APPOConfig(VTraceConfig, ClippedConfig):
    """Asynchronous PPO: the clipped objective with V-trace's advantages, for experience of older policies. Workers act
    ahead of the learner where `rollout.max_policy_lag` is 1 or more."""

    learner: ClassVar[str] = "stagecoach.trainer_node.learning.algorithms.appo:APPO"
    name: str = "appo"
    vtrace_lambda: float = Field(0.95, ge=0, le=1)
    """λ of V-trace; 1 in the paper, below it as in PPO."""
    clip_against: Literal["behavior", "target"] = "behavior"
    """The policy in the ratio's denominator: the one that acted, or the target network, with V-trace's weights."""
    target_updates: int = Field(1, ge=1)
    """The target network becomes the policy every so many updates; 1 is at the beginning of each."""
    kl_coefficient: float = Field(0.0, ge=0)
    """Weight of the KL divergence of the policy from the target network."""


class IMPALAConfig(VTraceConfig, OnPolicyConfig):
    """Importance-weighted actor-learner (Espeholt et al. 2018): V-trace, one gradient step for each update. Workers act
    ahead of the learner where `rollout.max_policy_lag` is 1 or more."""

    learner: ClassVar[str] = "stagecoach.trainer_node.learning.algorithms.a2c:IMPALA"
    name: str = "impala"
    learning_rate: ScheduleField = Schedule(start=6e-4)
    normalize_advantages: bool = False
    """Zero mean, unit variance per batch, with the weights."""
