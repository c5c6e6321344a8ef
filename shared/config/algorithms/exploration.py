"""How workers choose actions in training: noise on continuous actions, chance among discrete ones."""

from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from stagecoach.shared.config.schema.section import OWN_KIND, Schedule, ScheduleField, Section, by_kind


class Sampling(Section):
    """Draws from the policy's distribution."""

    kind: Literal["sampling"] = "sampling"


class EpsilonGreedy(Section):
    """A uniform action with probability ε, else the best one."""

    kind: Literal["epsilon_greedy"] = "epsilon_greedy"
    epsilon: ScheduleField = Schedule(kind="linear", start=1.0, end=0.05, over="10000 env_steps")
    """The probability: a number or a schedule."""


class Boltzmann(Section):
    """Draws a choice with probability softmax(values / temperature): the better, the more likely."""

    kind: Literal["boltzmann"] = "boltzmann"
    temperature: ScheduleField = Schedule(start=1.0)
    """In units of the values, which are discounted returns; above 0."""

    @model_validator(mode="after")
    def _warm(self) -> Self:
        if self.temperature.least <= 0:
            raise ValueError(
                f"temperature gets to {self.temperature.least:g}: values are divided by it, so it must stay above 0"
            )
        return self


class UpperConfidenceBound(Section):
    """The best action by mean + coefficient × deviation over the heads of an ensemble (Chen et al. 2017)."""

    kind: Literal["ucb"] = "ucb"
    coefficient: ScheduleField = Schedule(start=0.1)
    """How many deviations of the heads' values an action is credited with."""
    epsilon: ScheduleField = Schedule(start=0.0)
    """Probability of a uniform action instead."""


class Bootstrapped(Section):
    """The best action by one head of an ensemble, another one in each episode (Osband et al. 2016)."""

    kind: Literal["bootstrapped"] = "bootstrapped"
    epsilon: ScheduleField = Schedule(start=0.0)
    """Probability of a uniform action instead."""


class GaussianNoise(Section):
    """Normal noise on what the policy draws, in units of half the action's range, clipped to the range."""

    kind: Literal["gaussian"] = "gaussian"
    sigma: ScheduleField = Schedule(start=0.1)
    """Standard deviation; 1 is half of each action's range."""
    bound: float | None = Field(None, gt=0)
    """Truncate the noise at ± this many σ; none by default."""
    uniform: float = Field(0.0, ge=0, le=1)
    """Probability of a uniform action instead, as upper levels of a hierarchy need (0.2 in Levy et al. 2019)."""


class TruncatedGaussianNoise(Section):
    """Draws from the normal distribution around what the policy draws, cut off at the action's bounds. Unlike clipped
    noise it does not heap actions up at the bounds."""

    kind: Literal["truncated_gaussian"] = "truncated_gaussian"
    sigma: ScheduleField = Schedule(start=0.1)
    """Standard deviation before it is cut off; 1 is half of each action's range."""


class OrnsteinUhlenbeckNoise(Section):
    """Noise that continues from step to step (Lillicrap et al. 2016), in units of half the action's range. It begins
    anew with each episode, already as spread as it becomes in time."""

    kind: Literal["ou"] = "ou"
    sigma: ScheduleField = Schedule(start=0.2)
    """Standard deviation of what is added at each step; in time the noise has σ / √(1 − (1 − θ)²), about 1.9 σ."""
    theta: float = Field(0.15, gt=0, le=1)
    """Share of the noise that is taken back at each step: it lasts for about 1 / θ steps."""


class ParameterNoise(Section):
    """Acts with disturbed weights, other ones for each episode (Plappert et al. 2018): a network per environment."""

    kind: Literal["parameter_noise"] = "parameter_noise"
    sigma: ScheduleField = Schedule(start=0.05)
    """Standard deviation of the normal noise on each weight. The paper adapts it; here it is what the schedule says."""


class OwnExploration(Section):
    """A way to explore of your own (docs/PYTHON.md)."""

    kind: str = Field(OWN_KIND, pattern=r"^[\w.]+:\w+$")
    """The path of a class that derives from `stagecoach.Exploration`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """What the class is made with, for each fragment."""
    schedules: dict[str, ScheduleField] = Field(default_factory=dict)
    """And these, each as its value at the trainer's counters."""

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
"""Ways to explore, as a config field: any, and those with continuous actions."""
