"""The configuration of TD3."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from shared.algorithm_configs.off_policy import OffPolicyConfig
from shared.exploration_config import ExplorationConfig, GaussianNoise, NoiseField
from shared.schedules import ScheduleField


class TD3Config(OffPolicyConfig):
    """Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018), for boxes with bounds."""

    policy: ClassVar[str] = "deterministic"
    critics: ClassVar[int] = 2
    name: Literal["td3"] = "td3"
    """The algorithm."""
    minibatch_size: int = Field(256, ge=1)
    """Transitions in one gradient step."""
    max_grad_norm: float | None = Field(None, gt=0)
    """Gradients are scaled down to this norm; null for none, as in the paper."""
    tau: float = Field(0.005, gt=0, le=1)
    """How far the targets go towards the networks at each step of the policy."""
    critic_learning_rate: ScheduleField | None = None
    """Step size of the critics; `learning_rate` by default."""
    policy_delay: int = Field(2, ge=1)
    """The policy and the targets move at every such gradient step of the critics."""
    target_noise: float = Field(0.2, ge=0)
    """Deviation of the noise on the target policy's actions; 1 is half of each action's range."""
    target_noise_clip: float = Field(0.5, ge=0)
    """Bound of that noise."""
    exploration: NoiseField = GaussianNoise()
    """Noise on the actions of the workers."""

    @property
    def acting(self) -> ExplorationConfig:
        """As `exploration` says."""
        return self.exploration
