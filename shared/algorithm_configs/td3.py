"""The configuration of TD3."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from shared.algorithm_configs.actor import ActorConfig


class TD3Config(ActorConfig):
    """Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018), for boxes with bounds."""

    policy: ClassVar[str] = "deterministic"
    critics: ClassVar[int] = 2
    name: Literal["td3"] = "td3"
    """The algorithm."""
    policy_delay: int = Field(2, ge=1)
    """The policy and the targets move at every such gradient step of the critics."""
    target_noise: float = Field(0.2, ge=0)
    """Deviation of the noise on the target policy's actions; 1 is half of each action's range."""
    target_noise_clip: float = Field(0.5, ge=0)
    """Bound of that noise."""
