"""The configuration of IMPALA."""

from __future__ import annotations

from typing import ClassVar, Literal

from shared.algorithm_configs.on_policy import OnPolicyConfig, VTraceConfig
from shared.schedules import Schedule, ScheduleField


class IMPALAConfig(VTraceConfig, OnPolicyConfig):
    """Importance-weighted actor-learner (Espeholt et al. 2018): V-trace, one gradient step for each update.

    Workers act ahead of the learner where `rollout.max_policy_lag` is 1 or more.
    """

    recurrent_policy: ClassVar[str | None] = "recurrent_actor_critic"
    name: Literal["impala"] = "impala"
    """The algorithm."""
    learning_rate: ScheduleField = Schedule(start=6e-4)
    """Adam's step size: a number, or a schedule."""
    normalise_advantages: bool = False
    """Zero mean, unit variance per batch, with the weights."""
