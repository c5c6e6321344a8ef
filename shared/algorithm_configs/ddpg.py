"""The configuration of DDPG."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from shared.algorithm_configs.off_policy import OffPolicyConfig
from shared.exploration_config import ExplorationConfig, GaussianNoise, NoiseField
from shared.schedules import ScheduleField


class DDPGConfig(OffPolicyConfig):
    """Deep deterministic policy gradient (Lillicrap et al. 2016), for boxes with bounds."""

    policy: ClassVar[str] = "deterministic"
    critics: ClassVar[int] = 1
    policy_delay: ClassVar[int] = 1
    target_noise: ClassVar[float] = 0.0
    target_noise_clip: ClassVar[float] = 0.0
    name: Literal["ddpg"] = "ddpg"
    """The algorithm."""
    minibatch_size: int = Field(256, ge=1)
    """Transitions in one gradient step."""
    max_grad_norm: float | None = Field(None, gt=0)
    """Gradients are scaled down to this norm; null for none, as in the paper."""
    tau: float = Field(0.005, gt=0, le=1)
    """How far the targets go towards the networks after each gradient step."""
    critic_learning_rate: ScheduleField | None = None
    """Step size of the critic; `learning_rate` by default."""
    exploration: NoiseField = GaussianNoise()
    """Noise on the actions of the workers; `ou` is the paper's."""

    @property
    def acting(self) -> ExplorationConfig:
        """As `exploration` says."""
        return self.exploration
