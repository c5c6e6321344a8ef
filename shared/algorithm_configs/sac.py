"""The configuration of soft actor-critic, and what it shares with CQL."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from shared.algorithm_configs.actor import ActorConfig
from shared.exploration_config import NoiseField, Sampling
from shared.schedules import ScheduleField


class SoftConfig(ActorConfig):
    """The fields of all that rewards entropy with a temperature."""

    policy: ClassVar[str] = "actor"
    temperature_learning_rate: ScheduleField | None = None
    """Step size of the temperature; `learning_rate` by default."""
    initial_temperature: float = Field(1.0, gt=0)
    """Weight of the entropy at the start (α)."""
    learn_temperature: bool = True
    """Move α such that the entropy comes to `target_entropy`; else it stays."""
    target_entropy: float | None = None
    """In nats, of actions in [-1, 1]. By default −1 for each element of the action; of a discrete one, that of
    ε-greedy acting with ε = 0.1 (0.20 for two choices, 0.58 for 18). The paper's 0.98 · ln(choices) is nearly uniform
    acting, which the temperature then enforces."""
    exploration: NoiseField = Sampling()
    """How workers act: `sampling` from the policy; with any noise, that is added to what was drawn."""


class SACConfig(SoftConfig):
    """Soft actor-critic (Haarnoja et al. 2018b), for boxes with bounds; Christodoulou (2019) for one choice."""

    name: Literal["sac"] = "sac"
    """The algorithm."""
