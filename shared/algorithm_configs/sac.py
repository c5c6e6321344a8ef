"""The configuration of soft actor-critic."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from shared.algorithm_configs.off_policy import OffPolicyConfig
from shared.exploration_config import ExplorationConfig, NoiseField, Sampling
from shared.schedules import ScheduleField


class SACConfig(OffPolicyConfig):
    """Soft actor-critic (Haarnoja et al. 2018b), for boxes with bounds; Christodoulou (2019) for one choice.

    Learns well with `policies.<id>.activation: relu`.
    """

    policy: ClassVar[str] = "actor"
    name: Literal["sac"] = "sac"
    """The algorithm."""
    minibatch_size: int = Field(256, ge=1)
    """Transitions in one gradient step."""
    max_grad_norm: float | None = Field(None, gt=0)
    """Gradients are scaled down to this norm; null for none, as in the paper."""
    tau: float = Field(0.005, gt=0, le=1)
    """How far the target critics go towards the critics after each gradient step."""
    critic_learning_rate: ScheduleField | None = None
    """Step size of the critics; `learning_rate` by default."""
    temperature_learning_rate: ScheduleField | None = None
    """Step size of the temperature; `learning_rate` by default."""
    initial_temperature: float = Field(1.0, gt=0)
    """Weight of the entropy at the start (α)."""
    learn_temperature: bool = True
    """Move α such that the entropy comes to `target_entropy`; else it stays."""
    target_entropy: float | None = None
    """In nats, of actions in [-1, 1]. By default −1 for each element of the action, and 0.98 · ln(choices) of a
    discrete one."""
    exploration: NoiseField = Sampling()
    """How workers act: `sampling` from the policy; with any noise, that is added to what was drawn."""

    @property
    def acting(self) -> ExplorationConfig:
        """As `exploration` says."""
        return self.exploration
