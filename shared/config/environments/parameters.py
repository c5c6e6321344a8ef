"""Sections of `environment.parameters`: values drawn for each episode, lessons, and replayed levels.

ML-Agents' keys (`sampler_type`, `curriculum`, `completion_criteria`, …) are accepted where their meaning is the same.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, TypeAdapter, model_validator

from stagecoach.shared.config.schema.section import Section
from stagecoach.shared.experience.parameters import ParameterTable, Sampler, Value

Measure = Literal["return", "success", "progress", "length", "rating"]
_MEASURES: dict[Measure, tuple[float, float]] = {
    "return": (-math.inf, math.inf), "success": (0, 1), "progress": (0, 1), "length": (0, math.inf),
    "rating": (-math.inf, math.inf),
}  # fmt: skip
"""Measure → its smallest and largest value."""
_Bounds = tuple[float, float]
_Whole = Annotated[int, Field(ge=-(1 << 53), le=1 << 53)]
_ML_AGENTS = {"behavior": "policy", "signal_smoothing": "smoothing", "min_lesson_length": "episodes"}


def _criterion(data: object) -> object:
    """`{return: 0.8, episodes: 100}` is short for `{measure: return, threshold: 0.8, episodes: 100}`."""
    if not isinstance(data, Mapping):
        return data
    if data.keys() & {"behavior", "min_lesson_length", "signal_smoothing", "require_reset"}:
        data = {_ML_AGENTS.get(name, name): value for name, value in data.items() if name != "require_reset"}
        data |= {"measure": "return"} if data.get("measure") == "reward" else {}
    named = [name for name in _MEASURES if name in data]
    if len(named) > 1:
        raise ValueError(f"{' and '.join(named)}: a criterion has one measure; leave one of them out")
    if not named:
        if "measure" in data:
            return data
        raise ValueError(
            f"found {sorted(map(str, data))}, expected one of {', '.join(_MEASURES)}, as in {{return: 0.8}}"
        )
    rest = {name: value for name, value in data.items() if name != named[0]}
    return {"measure": named[0], "threshold": data[named[0]], **rest}


class CriterionConfig(Section):
    """End of a lesson: `{return: 0.8, episodes: 100}`."""

    measure: Measure
    """Measured value. Over the lesson's last `episodes` episodes: mean `return`, `success` (share) or `length`.
    `progress`: trained share of `stop_at.env_steps`. `rating`: in the league."""
    threshold: float
    """`until` is met at this or more, `back` at this or less."""
    episodes: int = Field(100, ge=1)
    """Minimum number of finished episodes that began in this lesson."""
    smoothing: bool = False
    """Smooths the measure as ML-Agents does: a quarter old value, three quarters new. It starts at the first mean
    (ML-Agents starts at 0, which favors negative returns)."""
    policy: str = ""
    """Policy whose return or rating is measured; by default all agents, or the only policy."""

    @model_validator(mode="after")
    def _can_be_met(self) -> Self:
        least, most = _MEASURES[self.measure]
        if not least <= self.threshold <= most:
            between = f"{least:g} or more" if math.isinf(most) else f"{least:g} to {most:g}"
            raise ValueError(f"{self.measure}={self.threshold:g} decides nothing; expected {between}")
        return self


_Criterion = Annotated[CriterionConfig, BeforeValidator(_criterion)]


def _sampler(data: object) -> object:
    """Converts a plain value or an ML-Agents sampler."""
    if isinstance(data, float) and not math.isfinite(data):
        raise ValueError(f"expected a finite number, found {data}")
    if isinstance(data, bool | int | float | str):
        return {"value": data}
    if not isinstance(data, Mapping):
        return data
    if "curriculum" in data:
        return {"lessons": data["curriculum"], **{name: its for name, its in data.items() if name != "curriculum"}}
    if "sampler_type" not in data:
        return data
    rest = {name: value for name, value in data.items() if name not in ("sampler_type", "sampler_parameters")}
    given = dict(data.get("sampler_parameters") or {})
    try:
        match data["sampler_type"]:
            case "uniform":
                return {"uniform": [given.pop("min_value"), given.pop("max_value")], **rest, **given}
            case "gaussian":
                return {"gaussian": [given.pop("mean"), given.pop("st_dev")], **rest, **given}
            case "multirangeuniform":
                return {"multi_range": given.pop("intervals"), **rest, **given}
    except KeyError as error:
        raise ValueError(f"sampler_type={data['sampler_type']}: sampler_parameters has no {error.args[0]}") from None
    raise ValueError(f"sampler_type={data['sampler_type']!r}; expected uniform, gaussian or multirangeuniform")


class SamplerConfig(Section):
    """Distribution of a parameter; a plain value is constant."""

    value: Value | None = None
    """Constant value."""
    integers: tuple[_Whole, _Whole] | None = None
    """Uniform integer between two inclusive bounds."""
    uniform: _Bounds | None = None
    """Uniform between two bounds."""
    gaussian: tuple[float, Annotated[float, Field(ge=0)]] | None = None
    """Mean and standard deviation."""
    log_uniform: _Bounds | None = None
    """Log-uniform between two bounds above 0."""
    choice: tuple[Value, ...] | None = None
    """Uniform choice of one value."""
    multi_range: tuple[_Bounds, ...] | None = None
    """Uniform over several ranges."""

    @property
    def _kinds(self) -> list[str]:
        return [name for name in SamplerConfig.model_fields if getattr(self, name) is not None]

    @property
    def others(self) -> list[str]:
        """Alternatives to a sampler that are set."""
        return []

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if len(found := [*self._kinds, *self.others]) != 1:
            expected = ", ".join(SamplerConfig.model_fields)
            raise ValueError(f"found {' and '.join(found) or 'nothing'}, expected one of {expected}")
        ranges = [self.integers, self.uniform, self.log_uniform, *(self.multi_range or ())]
        if empty := [list(each) for each in ranges if each is not None and each[0] > each[1]]:
            raise ValueError(f"the range {empty[0]} is empty; expected [low, high]")
        if wide := [list(each) for each in ranges if each is not None and math.isinf(each[1] - each[0])]:
            raise ValueError(f"the range {wide[0]} is wider than the largest number; narrow it")
        if self.log_uniform is not None and self.log_uniform[0] <= 0:
            raise ValueError(f"log_uniform={list(self.log_uniform)}: expected bounds above 0")
        if (self.choice is not None and not self.choice) or (self.multi_range is not None and not self.multi_range):
            raise ValueError(f"{found[0]} is empty; give at least one")
        return self

    @property
    def sampler(self) -> Sampler:
        return _made(self, *self._kinds)


def _made(config: SamplerConfig, kind: Any) -> Sampler:
    if config.choice is not None:
        return Sampler("choice", choices=config.choice)
    if config.value is not None:
        return Sampler("value", choices=(config.value,))
    bounds = [config.integers, config.uniform, config.gaussian, config.log_uniform, *(config.multi_range or ())]
    return Sampler(kind, tuple(bound for each in bounds for bound in each or ()))


_Sampler = Annotated[SamplerConfig, BeforeValidator(_sampler)]


def _lesson(data: object) -> object:
    if not isinstance(data, Mapping):
        return _sampler(data)
    found = dict(data)
    if "completion_criteria" in found:
        found["until"] = found.pop("completion_criteria")
    if isinstance(found.get("value"), Mapping):  # ML-Agents has samplers there
        found |= dict(_sampler(found.pop("value")))  # type: ignore[call-overload]
    return _sampler(found)


class LessonConfig(SamplerConfig):
    """One lesson: the parameter's distribution, and the end of the lesson."""

    name: str = Field("", max_length=100)
    """Name for display."""
    values: dict[str, _Sampler] = {}
    """Several parameters that change together, by name, instead of one value."""
    until: _Criterion | None = None
    """Condition for the next lesson; required in every lesson but the last."""
    back: _Criterion | None = None
    """Condition for returning to the previous lesson."""

    @property
    def others(self) -> list[str]:
        return ["values"] if self.values else []


class LevelReplayConfig(Section):
    """Prioritized level replay (Jiang, Grefenstette and Rocktäschel 2021): draws levels by learning potential, for PPO,
    A2C, IMPALA and APPO with one agent."""

    of: int = Field(ge=2, le=100_000)
    """Number of levels; the parameter is an integer below it."""
    score: Literal["value_loss", "positive_value_loss", "gae", "learnability"] = "value_loss"
    """Score of a level from the advantages A of its last episode: the mean of |A|, of max(A, 0), or of A. Or
    `learnability`, p (1 − p) for the share p of successes in about the last ten (Rutherford et al. 2024, SFL)."""
    prioritization: Literal["rank", "proportional"] = "rank"
    """Weight of level i: (1 / rank_i)^(1/T) or score_i^(1/T)."""
    temperature: float = Field(0.1, gt=0)
    """T: smaller values favor the best scores."""
    staleness: float = Field(0.1, ge=0, le=1)
    """Share of the weight given to levels that were not played recently."""
    new: float | None = Field(None, ge=0, lt=1)
    """Share of episodes in unplayed levels, while there are any; by default their share of all levels."""


class ParameterConfig(SamplerConfig):
    """One entry of `environment.parameters`: a sampler, lessons, or replayed levels."""

    lessons: tuple[Annotated[LessonConfig, BeforeValidator(_lesson)], ...] = ()
    """Lessons in order."""
    replay: LevelReplayConfig | None = None
    """Prioritized level replay."""

    @property
    def others(self) -> list[str]:
        return ["lessons"] * bool(self.lessons) + ["replay"] * (self.replay is not None)

    @model_validator(mode="after")
    def _lessons_follow(self) -> Self:
        untils = [lesson.until for lesson in self.lessons if lesson.until is not None]
        shares = [until.threshold for until in untils if until.measure == "progress"]
        if shares != sorted(set(shares)):
            raise ValueError(f"lessons end at progress {', '.join(f'{its:g}' for its in shares)}; each has to be later")
        for number, lesson in enumerate(self.lessons):
            last = number == len(self.lessons) - 1
            if not last and lesson.until is None:
                raise ValueError(f"lesson {number} has no `until`, so lesson {number + 1} would never start; add one")
            if last and lesson.until is not None:
                raise ValueError(f"lesson {number} is the last one, and has an `until`; leave it out, or add a lesson")
            if not number and lesson.back is not None:
                raise ValueError("lesson 0 has a `back`, but no lesson comes before it; leave it out")
            if lesson.back is not None and lesson.back.measure == "progress":
                raise ValueError(f"lesson {number}: `back` cannot use progress, which never decreases; use another")
            if lesson.values.keys() != self.lessons[0].values.keys():
                found, expected = sorted(lesson.values), sorted(self.lessons[0].values)
                raise ValueError(f"lesson {number} sets {found or 'one value'}, expected {expected or 'one value'}")
            if not lesson.back or not lesson.until or lesson.back.measure != lesson.until.measure:
                continue
            if lesson.back.threshold >= lesson.until.threshold:
                raise ValueError(
                    f"lesson {number} goes back at {lesson.back.measure} {lesson.back.threshold:g} or less and on at "
                    f"{lesson.until.threshold:g} or more; `back` has to be the smaller one"
                )
        return self

    def samplers(self, name: str, lesson: int) -> dict[str, Sampler]:
        """Returns the samplers of this entry by parameter; replayed levels are uniform."""
        if self.replay is not None:
            return {name: Sampler("levels", (1.0,) * self.replay.of)}
        if not self.lessons:
            return {name: self.sampler}
        config = self.lessons[lesson]
        return {key: its.sampler for key, its in config.values.items()} or {name: config.sampler}

    @property
    def criteria(self) -> list[CriterionConfig]:
        return [each for lesson in self.lessons for each in (lesson.until, lesson.back) if each is not None]


ParameterField = Annotated[ParameterConfig, BeforeValidator(_sampler)]
SamplerField = _Sampler
_SAMPLER: TypeAdapter[SamplerConfig] = TypeAdapter(_Sampler)


def sampler_of(value: object) -> Sampler:
    """Returns the sampler of a value, or of a mapping as `environment.parameters` has; raises `ValueError`."""
    return _SAMPLER.validate_python(value).sampler


def table_at(parameters: Mapping[str, ParameterConfig], lessons: Mapping[str, int]) -> ParameterTable:
    """Returns the samplers of these lessons."""
    samplers: dict[str, Sampler] = {}
    for name, entry in parameters.items():
        samplers |= entry.samplers(name, lessons.get(name, 0))
    return ParameterTable(samplers, dict(lessons))


def evaluated_table(
    parameters: Mapping[str, ParameterConfig], instead: Mapping[str, SamplerConfig]
) -> ParameterTable | None:
    """Returns the samplers of evaluations: the last lessons and uniform levels, or those of `evaluation.parameters`."""
    if not parameters:
        return None
    last = {name: len(entry.lessons) - 1 for name, entry in parameters.items() if entry.lessons}
    table = table_at(parameters, last)
    return ParameterTable(table.samplers | {name: its.sampler for name, its in instead.items()}, last)
