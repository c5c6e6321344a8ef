"""The configuration of A2C."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from shared.algorithm_configs.on_policy import OnPolicyConfig
from shared.schedules import Schedule, ScheduleField

if TYPE_CHECKING:
    from shared.config import Config


class A2CConfig(OnPolicyConfig):
    """Advantage actor-critic: A3C (Mnih et al. 2016) in lockstep, one gradient step for each update."""

    recurrent_policy: ClassVar[str | None] = "recurrent_actor_critic"
    name: Literal["a2c"] = "a2c"
    """The algorithm."""
    learning_rate: ScheduleField = Schedule(start=7e-4)
    """Adam's step size: a number, or a schedule."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """λ of generalised advantage estimation; 1 is the n-step return of the paper."""
    normalise_advantages: bool = False
    """Zero mean, unit variance per batch."""

    def refuse(self, run: Config) -> None:
        """Raises `ValueError` where older policies would act: nothing here corrects for that."""
        if run.rollout.max_policy_lag:
            raise ValueError(
                f"rollout.max_policy_lag={run.rollout.max_policy_lag} with algorithm.name=a2c: its gradient is wrong "
                f"for what an older policy acted; set it to 0, or use impala or appo, which correct for that"
            )
