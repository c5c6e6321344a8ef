"""How workers choose actions in training: a section for each way, all of them functions of the trainer's counters."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field

from shared.schedules import Schedule, ScheduleField
from shared.section import Section


class Sampling(Section):
    """Draws from the policy's distribution."""

    kind: Literal["sampling"] = "sampling"
    """Draws from the policy's distribution."""


class EpsilonGreedy(Section):
    """A uniform action with probability ε, else the best one."""

    kind: Literal["epsilon_greedy"] = "epsilon_greedy"
    """A uniform action with probability ε, else the best one."""
    epsilon: ScheduleField = Schedule(kind="linear", start=1.0, end=0.05, over="10000 env_steps")
    """The probability: a number or a schedule."""


class GaussianNoise(Section):
    """Normal noise on the action, in units of half the action's range, clipped to the range."""

    kind: Literal["gaussian"] = "gaussian"
    """Normal noise on the action."""
    sigma: ScheduleField = Schedule(start=0.1)
    """Standard deviation; 1 is half of each action's range."""
    bound: float | None = Field(None, gt=0)
    """Truncate the noise at ± this many σ; none by default."""


ExplorationConfig = Sampling | EpsilonGreedy | GaussianNoise
ExplorationField = Annotated[ExplorationConfig, Discriminator("kind")]
