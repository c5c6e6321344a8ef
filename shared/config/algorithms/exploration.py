"""Exploration in training: noise on continuous actions, random choices of discrete actions."""

from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from stagecoach.shared.config.schema.section import OWN_KIND, Schedule, ScheduleField, Section, by_kind


class Sampling(Section):
    """Draws from the policy's distribution."""

    kind: Literal["sampling"] = "sampling"


class EpsilonGreedy(Section):
    """Takes a uniformly random action with probability ε, else the best one."""

    kind: Literal["epsilon_greedy"] = "epsilon_greedy"
    epsilon: ScheduleField = Schedule(kind="linear", start=1.0, end=0.05, over="10000 env_steps")
    """The probability: a number or a schedule."""


class Boltzmann(Section):
    """Draws an action with probability softmax(values / temperature)."""

    kind: Literal["boltzmann"] = "boltzmann"
    temperature: ScheduleField = Schedule(start=1.0)
    """Temperature in units of the values (discounted returns); above 0."""

    @model_validator(mode="after")
    def _warm(self) -> Self:
        if self.temperature.least <= 0:
            raise ValueError(
                f"temperature gets to {self.temperature.least:g}: values are divided by it, so it must stay above 0"
            )
        return self


class UpperConfidenceBound(Section):
    """Takes the best action by mean + coefficient × deviation over the heads of an ensemble (Chen et al. 2017)."""

    kind: Literal["ucb"] = "ucb"
    coefficient: ScheduleField = Schedule(start=0.1)
    """Number of standard deviations added to each action's mean value."""
    epsilon: ScheduleField = Schedule(start=0.0)
    """Probability of a uniform action instead."""


class Bootstrapped(Section):
    """Takes the best action by one head of an ensemble, a different one in each episode (Osband et al. 2016)."""

    kind: Literal["bootstrapped"] = "bootstrapped"
    epsilon: ScheduleField = Schedule(start=0.0)
    """Probability of a uniform action instead."""


class GaussianNoise(Section):
    """Adds normal noise in units of half the action's range to the policy's action, clipped to the range."""

    kind: Literal["gaussian"] = "gaussian"
    sigma: ScheduleField = Schedule(start=0.1)
    """Standard deviation; 1 is half of each action's range."""
    bound: float | None = Field(None, gt=0)
    """Truncate the noise at ± this many σ; none by default."""
    uniform: float = Field(0.0, ge=0, le=1)
    """Probability of a uniform action instead, as upper levels of a hierarchy need (0.2 in Levy et al. 2019)."""


class TruncatedGaussianNoise(Section):
    """Draws from a normal distribution around the policy's action, truncated at the action's bounds. Unlike clipped
    noise, it has no mass at the bounds."""

    kind: Literal["truncated_gaussian"] = "truncated_gaussian"
    sigma: ScheduleField = Schedule(start=0.1)
    """Standard deviation before truncation; 1 is half of each action's range."""


class OrnsteinUhlenbeckNoise(Section):
    """Adds temporally correlated noise (Lillicrap et al. 2016) in units of half the action's range. Each episode starts
    from the stationary distribution."""

    kind: Literal["ou"] = "ou"
    sigma: ScheduleField = Schedule(start=0.2)
    """Standard deviation of each step's increment; the noise itself has σ / √(1 − (1 − θ)²), about 1.9 σ."""
    theta: float = Field(0.15, gt=0, le=1)
    """Rate of mean reversion; the noise is correlated over about 1 / θ steps."""


class ParameterNoise(Section):
    """Perturbs the network's weights in each episode (Plappert et al. 2018): one network per environment."""

    kind: Literal["parameter_noise"] = "parameter_noise"
    sigma: ScheduleField = Schedule(start=0.05)
    """Standard deviation of the noise on each weight. The paper adapts it; here it follows the schedule."""


class OwnExploration(Section):
    """Custom exploration (docs/how-to/own-exploration.md)."""

    kind: str = Field(OWN_KIND, pattern=r"^[\w.]+:\w+$")
    """Import path of a class that derives from `stagecoach.Exploration`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class."""
    schedules: dict[str, ScheduleField] = Field(default_factory=dict)
    """Keyword arguments that are schedules; the class gets their current values."""

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        if twice := sorted(self.kwargs.keys() & self.schedules.keys()):
            raise ValueError(f"{twice} stand in kwargs and in schedules; give each in one of them")
        return self


NoiseConfig = (
    Sampling | GaussianNoise | TruncatedGaussianNoise | OrnsteinUhlenbeckNoise | ParameterNoise | OwnExploration
)
ExplorationConfig = NoiseConfig | EpsilonGreedy | Boltzmann | UpperConfidenceBound | Bootstrapped
if TYPE_CHECKING:
    ExplorationField = ExplorationConfig
    NoiseField = NoiseConfig
else:
    ExplorationField, NoiseField = by_kind(ExplorationConfig), by_kind(NoiseConfig)
"""Exploration as a config field: any, and for continuous actions."""
