"""A study's file: what is varied, how a trial is scored, and which trials are stopped early."""

import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.config.loading import load_config, parse_yaml
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.config.schema.section import Section, short_for
from stagecoach.shared.config.schema.validation import validated

_FIXED = ("seed", "runs_dir", "redis", "store", "ray", "stop_at", "evaluation", "checkpoint", "archive", "metrics")
"""Fields and sections that no study varies: a trial's identity, its services, its length and its scores."""
_WHOLE = 1 << 53


def label(value: Any) -> str:
    """Text of a choice."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


class DimensionConfig(Section):
    """Range of one field; the words are those of `environment.parameters`."""

    uniform: tuple[float, float] | None = None
    """Lowest and highest number."""
    log_uniform: tuple[float, float] | None = None
    """The same on a logarithmic scale; both above 0."""
    integers: tuple[int, int] | None = None
    """Smallest and largest integer, both included."""
    log_integers: tuple[int, int] | None = None
    """The same on a logarithmic scale; both above 0."""
    choice: tuple[Any, ...] | None = None
    """Unordered values of any kind."""
    step: float | None = Field(None, gt=0)
    """Distance between the values of `uniform` or `integers`, from the lowest on."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        kinds = [name for name in type(self).model_fields if name != "step" and getattr(self, name) is not None]
        if len(kinds) != 1:
            raise ValueError(
                f"found {' and '.join(kinds) or 'nothing'}, expected one of uniform, log_uniform, integers, "
                f"log_integers, choice, as in {{log_uniform: [1e-4, 1e-2]}}"
            )
        if self.choice is not None:
            if len(self.choice) < 2 or len(set(self.labels)) < len(self.choice):
                raise ValueError(f"choice={list(self.choice)}: expected two or more different values")
        else:
            low, high = self.bounds
            if not low < high or math.isinf(high - low) or (self.has_integers and max(abs(low), abs(high)) > _WHOLE):
                raise ValueError(f"{kinds[0]}=[{low:g}, {high:g}]: expected [low, high] with low below high")
            if self.logarithmic and low <= 0:
                raise ValueError(f"{kinds[0]}=[{low:g}, {high:g}]: expected bounds above 0")
        if self.step is not None and (kinds[0] not in ("uniform", "integers") or self.step > high - low):
            raise ValueError(f"step={self.step:g} with {kinds[0]}: expected it with uniform or integers, within them")
        if self.step is not None and self.has_integers and not self.step.is_integer():
            raise ValueError(f"step={self.step:g}: expected a whole number with integers")
        return self

    @property
    def bounds(self) -> tuple[float, float]:
        found = self.uniform or self.log_uniform or self.integers or self.log_integers
        assert found is not None
        return found

    @property
    def has_integers(self) -> bool:
        return self.integers is not None or self.log_integers is not None

    @property
    def logarithmic(self) -> bool:
        return self.log_uniform is not None or self.log_integers is not None

    @property
    def labels(self) -> list[str]:
        """Text of each choice: Optuna's categories, which may hold lists and sections this way."""
        return [label(value) for value in self.choice or ()]

    @property
    def extremes(self) -> tuple[Any, ...]:
        """The values that must be valid: the bounds, or every choice."""
        return self.bounds if self.choice is None else self.choice


class ObjectiveConfig(Section):
    """Score of a trial, from its evaluations; with several seeds the mean of theirs."""

    measure: Literal["mean_return", "auc", "seconds"] = "mean_return"
    """`mean_return`: mean return of the last evaluations. `auc`: mean return over the env steps of training (area under
    the curve by its width). `seconds`: wall-clock time until an evaluation reaches `score`, the less the better."""
    last: int = Field(3, ge=1)
    """Number of evaluations that `mean_return` averages."""
    score: float | None = None
    """Return to reach, for `seconds`."""

    @model_validator(mode="after")
    def _score_for_seconds(self) -> Self:
        if (self.measure == "seconds") != (self.score is not None):
            raise ValueError(
                f"score={self.score} with measure={self.measure}: `seconds` needs a score to reach, only it"
            )
        return self

    @property
    def maximize(self) -> bool:
        return self.measure != "seconds"


class PruningConfig(Section):
    """Early end of the weaker trials of a generation (successive halving), decided when all of it are that far."""

    at: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1)
    """Env steps of training at which trials are compared."""
    keep: float = Field(0.5, gt=0, lt=1)
    """Share of the compared trials that continue, rounded up."""

    @model_validator(mode="after")
    def _later_and_later(self) -> Self:
        if list(self.at) != sorted(set(self.at)):
            raise ValueError(f"at={list(self.at)}: expected env steps that come later and later")
        return self


class PopulationConfig(Section):
    """Population based training (Jaderberg et al. 2017): a generation is a population, and each of its trials continues
    one of the generation before. The weakest continue a copy of one of the best, with changed parameters."""

    replaced: float = Field(0.25, gt=0, le=0.5)
    """Share of a generation that is replaced by copies of the same share of the best, at least one trial."""
    factors: tuple[Annotated[float, Field(gt=0)], ...] = Field((0.8, 1.25), min_length=1)
    """A copy's number with a logarithmic range is multiplied by one of these; any other moves by the same share of its
    range (0.8: 20 % down), and a choice to a neighbor."""
    resample: float = Field(0.25, ge=0, le=1)
    """Probability of a new random value instead, for each parameter."""


class StudyConfig(Section):
    """A study: trials of one config, in generations."""

    config: str = Field(min_length=1)
    """Config file, relative to the study's, or a preset's name."""
    set: dict[str, Any] = {}
    """Changed fields of the config, by dotted name."""
    space: dict[str, DimensionConfig] = Field(min_length=1)
    """Dotted field → its range."""
    trials: int = Field(16, ge=1, le=10_000)
    """Number of trials, a multiple of `generation`; a finished study continues with more."""
    generation: int = Field(4, ge=1)
    """Trials suggested together, from the results of earlier generations. As many can train side by side."""
    parallel: int = Field(1, ge=1)
    """Runs that train at a time; no result depends on it, except for `seconds`."""
    seed: int = Field(1, ge=0)
    """Seed of the sampler; the runs' seeds begin with the config's."""
    seeds: int = Field(1, ge=1, le=1000)
    """Seeds of each trial, the same for all trials."""
    sampler: Literal["tpe", "random"] = "tpe"
    """Optuna's sampler. `tpe` draws its first ten trials at random."""
    objective: Annotated[ObjectiveConfig, short_for("measure", str)] = ObjectiveConfig()
    """Score of a trial; the name of a measure is short for its section."""
    evaluations: int = Field(10, ge=1)
    """Number of evaluations in a trial, evenly over `stop_at.env_steps`."""
    pruning: PruningConfig | None = None
    """Early end of weak trials; by default every trial is trained to its end."""
    population: PopulationConfig | None = None
    """Population based training instead of independent trials: the generations share the training, so that each trial
    trains `stop_at.env_steps` × `generation` / `trials`. The first generation is random."""
    exact: bool = True
    """Guarantees the same trials and policies after any interruption. `false` allows what depends on the clock:
    the measure `seconds`, and `rollout.max_policy_lag` above 0."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.trials % self.generation:
            raise ValueError(f"trials={self.trials}: expected a multiple of generation={self.generation}")
        if self.exact and self.objective.measure == "seconds":
            raise ValueError("objective.measure=seconds depends on the clock; set exact: false")
        if self.population is not None:
            self._check_population()
        if fixed := [name for name in self.space if name.partition(".")[0] in _FIXED]:
            raise ValueError(f"space.{fixed[0]}: no study varies {', '.join(_FIXED)}; remove it, or put it under set")
        if both := sorted(self.space.keys() & self.set.keys()):
            raise ValueError(f"{both[0]} is under both space and set; leave one out")
        return self

    def _check_population(self) -> None:
        if self.generation < 2 or self.trials < 2 * self.generation:
            raise ValueError(
                f"population with trials={self.trials}, generation={self.generation}: expected two or more trials in "
                f"each of two or more generations"
            )
        if self.pruning is not None or self.seeds > 1 or self.objective.measure == "seconds":
            raise ValueError("population: leave out pruning, and use seeds=1 and another measure than seconds")
        if wrong := [name for name in self.space if name.startswith("policies") or name == "algorithm.name"]:
            raise ValueError(f"space.{wrong[0]}: a copy in a population keeps its network and algorithm; remove it")

    @property
    def generations(self) -> int:
        return self.trials // self.generation

    def base(self, folder: Path) -> Config:
        """Loads the config without the space; raises `ConfigError`."""
        return load_config(self.config_path(folder), self.set)

    def config_path(self, folder: Path) -> Path:
        """The config as an argument of `stagecoach train`: a file's path, or a preset's name."""
        path = Path(self.config).expanduser()
        return folder / path if path.suffix in (".yaml", ".yml") or len(path.parts) > 1 else path


def read_study(path: Path) -> StudyConfig:
    """Reads a study's file; raises `ConfigError` with all mistakes."""
    try:
        text = path.expanduser().read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the study {path}: {getattr(error, 'strerror', None) or error}") from None
    return validated(StudyConfig, parse_yaml(text, str(path)))


def check_study(study: StudyConfig, base: Config) -> None:
    """Raises `ConfigError` if a trial could not be trained or scored as the study says."""
    steps = base.stop_at.env_steps
    if steps is None:
        raise ConfigError("a trial has a fixed length: give the config stop_at.env_steps, for example under set")
    if not base.evaluation.enabled:
        raise ConfigError("evaluation.episodes=0: a trial is scored by its evaluations; expected 1 or more")
    if steps < study.evaluations:
        raise ConfigError(f"evaluations={study.evaluations}: expected at most stop_at.env_steps={steps}")
    every = steps // study.evaluations
    if study.population is not None:
        if study.evaluations % study.generations:
            raise ConfigError(
                f"evaluations={study.evaluations} with population: expected a multiple of the {study.generations} "
                f"generations, such as {-(-study.evaluations // study.generations) * study.generations}"
            )
        if base.replace("stop_at.env_steps", steps + 1).hash() != base.hash():
            raise ConfigError("population: lessons depend on stop_at.env_steps, of which a trial has a part")
        base.replace("fork_from", "the/former")
    for at in study.pruning.at if study.pruning else ():
        if not every <= at < steps:
            raise ConfigError(f"pruning.at={at}: expected {every} (the first evaluation) to {steps - 1} env steps")
        if base.replace("stop_at.env_steps", at).hash() != base.hash():
            raise ConfigError("pruning: the config's lessons depend on stop_at.env_steps, so a trial cannot pause")
    for field, dimension in study.space.items():
        found = [_varied(base, field, value) for value in dimension.extremes]
        if study.exact and len({config.hash() for config in found}) < 2:
            raise ConfigError(f"space.{field}: it does not affect learning, so no trial differs by it; remove it")
        for config in found:
            if study.exact and (lag := config.rollout.max_policy_lag):
                raise ConfigError(
                    f"rollout.max_policy_lag={lag}: what was acted meanwhile depends on the clock; set it to 0 (under "
                    f"set), or exact: false"
                )


def _varied(base: Config, field: str, value: Any) -> Config:
    try:
        return base.replace(field, value)
    except ConfigError as error:
        raise ConfigError(f"space.{field}: at {value!r}: {error}") from None
