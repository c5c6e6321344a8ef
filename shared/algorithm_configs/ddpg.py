"""The configuration of DDPG."""

from __future__ import annotations

from typing import ClassVar, Literal

from shared.algorithm_configs.actor import ActorConfig


class DDPGConfig(ActorConfig):
    """Deep deterministic policy gradient (Lillicrap et al. 2016), for boxes with bounds.

    With `algorithm.exploration.kind: ou` it explores as the paper does.
    """

    policy: ClassVar[str] = "deterministic"
    critics: ClassVar[int] = 1
    policy_delay: ClassVar[int] = 1
    target_noise: ClassVar[float] = 0.0
    target_noise_clip: ClassVar[float] = 0.0
    name: Literal["ddpg"] = "ddpg"
    """The algorithm."""
