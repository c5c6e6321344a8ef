"""The configuration of CQL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from shared.algorithm_configs.off_policy import LARGE_NETWORK
from shared.algorithm_configs.sac import SoftConfig


class CQLConfig(SoftConfig):
    """Conservative Q-learning (Kumar et al. 2020): soft actor-critic that learns from data.

    It believes in no action that the data do not have. For boxes with bounds, or one discrete choice.
    """

    defaults: ClassVar[Mapping[str, Any]] = {"policies": LARGE_NETWORK, "rollout": {"max_policy_lag": 1}}
    name: Literal["cql"]
    """The algorithm."""
    conservatism: float = Field(5.0, gt=0)
    """Weight of the critics' penalty (the paper's α; 5 or 10 there for boxes, 0.5 to 4 for choices); with `largest_gap`
    only where it begins. It goes with how much single actions change the returns: where they are small, less."""
    largest_gap: float | None = None
    """Learn the weight, such that on average the critics value what could be done by this much more than what the data
    did (the paper's τ; 5 or 10 there): more weight above it, less below. Null: the weight stays."""
    conservatism_learning_rate: float = Field(3e-4, gt=0)
    """Step size of the logarithm of the weight, where that is learnt."""
    considered_actions: int = Field(10, ge=1)
    """Actions of boxes that are drawn for the penalty from each of three sources: uniformly, from the policy at the
    observation, and at the next one. The critics judge three times as many for each transition: the cost of CQL."""
    value_entropy: bool = False
    """Whether the critics' targets count the policy's entropy, as SAC's do. The authors' code leaves it out."""
    cloning_steps: int = Field(0, ge=0)
    """Gradient steps at the beginning in which the policy only does what the data do, and the critics learn."""
    gradient_steps_per_env_step: float = Field(0.1, gt=0, le=1000)
    """Gradient steps for each env step read. With minibatches of 256, 0.1 uses a transition some 25 times an epoch."""
