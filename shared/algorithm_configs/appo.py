"""The configuration of APPO."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from shared.algorithm_configs.on_policy import ClippedConfig, VTraceConfig


class APPOConfig(VTraceConfig, ClippedConfig):
    """Asynchronous PPO: the clipped objective with V-trace's advantages, for experience of older policies.

    Workers act ahead of the learner where `rollout.max_policy_lag` is 1 or more.
    """

    recurrent_policy: ClassVar[str | None] = "recurrent_actor_critic"
    name: Literal["appo"] = "appo"
    """The algorithm."""
    vtrace_lambda: float = Field(0.95, ge=0, le=1)
    """λ of V-trace; 1 in the paper, below it as in PPO."""
    clip_against: Literal["behaviour", "target"] = "behaviour"
    """What the ratio of the clipped objective is taken against: the policy that acted, or the target network, with
    V-trace's weights on the advantages."""
    target_updates: int = Field(1, ge=1)
    """The target network becomes the policy every so many updates; 1 is at the beginning of each."""
    kl_coefficient: float = Field(0.0, ge=0)
    """Weight of the KL divergence of the policy from the target network."""
