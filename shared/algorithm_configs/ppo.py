"""The configuration of PPO."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from shared.algorithm_configs.on_policy import ClippedConfig


class PPOConfig(ClippedConfig):
    """Proximal policy optimisation (Schulman et al. 2017), clipped objective."""

    recurrent_policy: ClassVar[str | None] = "recurrent_actor_critic"
    name: Literal["ppo"] = "ppo"
    """The algorithm."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """λ of generalised advantage estimation (Schulman et al. 2016)."""
