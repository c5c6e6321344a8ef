"""Sections of PPO, A2C, APPO and IMPALA."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from stagecoach.shared.config.algorithms.base import BatchOfUpdate, Signals
from stagecoach.shared.config.schema.section import Schedule, ScheduleField, Section


class OnPolicyConfig(Signals):
    """Fields of all on-policy algorithms."""

    learns_from_others: ClassVar[bool] = False
    recurrent_policy: ClassVar[str | None] = "recurrent_actor_critic"
    entropy_coefficient: ScheduleField = Schedule(start=0.0)
    """Weight of the entropy bonus; a number or a schedule."""
    value_coefficient: float = Field(0.5, ge=0)
    """Weight of the value loss."""
    max_grad_norm: float = Field(0.5, gt=0)
    """Maximum norm of the gradients."""
    adam_epsilon: float = Field(1e-5, gt=0)
    """Adam's ε; 1e-5 as in the reference implementations."""
    normalize_values: bool = False
    """Lets the critic predict normalized returns, as in MAPPO (Yu et al. 2022): for returns that are large or grow.
    Advantages keep the environment's units."""

    def network(self) -> dict[str, Any]:
        """Returns the argument for value normalization, if it is on."""
        return {"normalize_values": True} if self.normalize_values else {}


class ClippedConfig(BatchOfUpdate, OnPolicyConfig):
    """Fields of the clipped objective: several passes over each batch."""

    epochs: int = Field(10, ge=1)
    """Passes over each update's batch."""
    clip_range: ScheduleField = Schedule(start=0.2)
    """ε of the clipped objective; a number or a schedule."""
    clip_range_value: float | None = Field(None, gt=0)
    """Bound of the change of the value prediction; none by default, since it seldom helps."""
    normalize_advantages: bool = True
    """Normalizes advantages to zero mean and unit variance per minibatch."""
    target_kl: float | None = Field(None, gt=0)
    """Ends an update's epochs once the approximate KL divergence from the initial policy exceeds 1.5 × this."""


class VTraceConfig(Section):
    """Fields of V-trace's targets."""

    vtrace_lambda: float = Field(1.0, ge=0, le=1)
    """λ of V-trace (Espeholt et al. 2018, remark 2); 1 as in the paper."""
    rho_bar: float = Field(1.0, gt=0)
    """ρ̄: bound of a transition's importance weight; determines the policy whose values are learned."""
    c_bar: float = Field(1.0, gt=0)
    """c̄: bound of the weight of later transitions; determines how fast the values are learned."""


class PPOConfig(ClippedConfig):
    """Proximal policy optimization (Schulman et al. 2017), clipped objective."""

    learner: ClassVar[str] = "stagecoach.trainer_node.learning.algorithms.ppo:PPO"
    name: str = "ppo"
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """λ of generalized advantage estimation (Schulman et al. 2016)."""
    magnet_coefficient: ScheduleField = Schedule(start=0.0)
    """Weight of the KL divergence of the policy from a magnet, a slow copy of it, for games against itself: magnetic
    mirror descent (Sokota et al. 2023). 0: no magnet."""
    magnet_rate: float = Field(0.01, gt=0, le=1)
    """Share of its distance to the policy that the magnet moves after each update."""


class A2CConfig(OnPolicyConfig):
    """Advantage actor-critic: A3C (Mnih et al. 2016) in lockstep, one gradient step for each update."""

    learner: ClassVar[str] = "stagecoach.trainer_node.learning.algorithms.a2c:A2C"
    corrects_policy_lag: ClassVar[bool] = False
    name: str = "a2c"
    learning_rate: ScheduleField = Schedule(start=7e-4)
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """λ of generalized advantage estimation; 1 is the n-step return of the paper."""
    normalize_advantages: bool = False
    """Normalizes advantages to zero mean and unit variance per batch."""


class APPOConfig(VTraceConfig, ClippedConfig):
    """Asynchronous PPO: the clipped objective with V-trace's advantages, for experience of older policies. With
    `rollout.max_policy_lag` of 1 or more, workers act ahead of the learner."""

    learner: ClassVar[str] = "stagecoach.trainer_node.learning.algorithms.appo:APPO"
    name: str = "appo"
    vtrace_lambda: float = Field(0.95, ge=0, le=1)
    """λ of V-trace; 1 in the paper, below it as in PPO."""
    clip_against: Literal["behavior", "target"] = "behavior"
    """Policy in the ratio's denominator: the one that acted, or the target network with V-trace's weights."""
    target_updates: int = Field(1, ge=1)
    """Updates between two copies of the policy into the target network."""
    kl_coefficient: float = Field(0.0, ge=0)
    """Weight of the KL divergence of the policy from the target network."""


class IMPALAConfig(VTraceConfig, OnPolicyConfig):
    """Importance-weighted actor-learner (Espeholt et al. 2018): V-trace, one gradient step per update. With
    `rollout.max_policy_lag` of 1 or more, workers act ahead of the learner."""

    learner: ClassVar[str] = "stagecoach.trainer_node.learning.algorithms.a2c:IMPALA"
    name: str = "impala"
    learning_rate: ScheduleField = Schedule(start=6e-4)
    normalize_advantages: bool = False
    """Normalizes weighted advantages to zero mean and unit variance per batch."""
