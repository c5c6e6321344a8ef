"""The config's `environment.parameters`: what is drawn anew for each episode, lessons, and levels that are replayed.

ML-Agents' words (`sampler_type`, `curriculum`, `completion_criteria`, …) are read where they mean the same.
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
"""With the least and the most that each can be."""
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
    """When a lesson is over: `{return: 0.8, episodes: 100}`."""

    measure: Measure
    """Mean over the lesson's last `episodes` episodes of their `return`, `success` (share) or `length`; `progress`: the
    share of `stop_at.env_steps` that was trained; `rating`: of the league."""
    threshold: float
    """`until` is met at this or more, `back` at this or less."""
    episodes: int = Field(100, ge=1)
    """How many of the lesson's own episodes have to have ended. One that began in another lesson is none of them."""
    smoothing: bool = False
    """Whether the measure is smoothed, as ML-Agents does: a quarter of what it was, three quarters of what it is. It
    begins with the first mean (ML-Agents begins with 0, which brings returns below 0 too near to it)."""
    policy: str = ""
    """Whose agents' return, or whose rating; by default all agents, or the only policy."""

    @model_validator(mode="after")
    def _can_be_met(self) -> Self:
        least, most = _MEASURES[self.measure]
        if not least <= self.threshold <= most:
            between = f"{least:g} or more" if math.isinf(most) else f"{least:g} to {most:g}"
            raise ValueError(f"{self.measure}={self.threshold:g} decides nothing; expected {between}")
        return self


_Criterion = Annotated[CriterionConfig, BeforeValidator(_criterion)]


def _sampler(data: object) -> object:
    """A plain value, and ML-Agents' samplers."""
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
    """How a parameter is drawn; a plain value is always that one."""

    value: Value | None = None
    """Always this."""
    integers: tuple[_Whole, _Whole] | None = None
    """A whole number between two bounds, both included, each alike."""
    uniform: _Bounds | None = None
    """Between two bounds."""
    gaussian: tuple[float, Annotated[float, Field(ge=0)]] | None = None
    """Mean and standard deviation."""
    log_uniform: _Bounds | None = None
    """Between two bounds above 0, each factor alike."""
    choice: tuple[Value, ...] | None = None
    """One of these, each alike."""
    multi_range: tuple[_Bounds, ...] | None = None
    """Between the bounds of one of several ranges, each value alike."""

    @property
    def _kinds(self) -> list[str]:
        return [name for name in SamplerConfig.model_fields if getattr(self, name) is not None]

    @property
    def others(self) -> list[str]:
        """What stands in the place of a sampler."""
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
            raise ValueError(f"the range {wide[0]} is wider than the largest number; bring its bounds nearer")
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
    """One lesson: how the parameter is drawn in it, and when it is over."""

    name: str = Field("", max_length=100)
    """For people."""
    values: dict[str, _Sampler] = {}
    """In place of one value: several parameters that change together, by name."""
    until: _Criterion | None = None
    """When the next lesson begins; every lesson but the last needs it."""
    back: _Criterion | None = None
    """When the one before begins again."""

    @property
    def others(self) -> list[str]:
        return ["values"] if self.values else []


class LevelReplayConfig(Section):
    """Prioritized level replay (Jiang, Grefenstette and Rocktäschel 2021): levels are drawn by what can be learned in
    them, for PPO, A2C, IMPALA and APPO with one agent."""

    of: int = Field(ge=2, le=100_000)
    """How many levels there are; the parameter is one of 0 to this less 1."""
    score: Literal["value_loss", "positive_value_loss", "gae"] = "value_loss"
    """Of a level, from the advantages A of its last episode: the mean of |A|, of max(A, 0), or of A itself."""
    prioritization: Literal["rank", "proportional"] = "rank"
    """Weighs level i by (1 / rank_i)^(1/T), or by score_i^(1/T)."""
    temperature: float = Field(0.1, gt=0)
    """T: the smaller, the more the best scores count."""
    staleness: float = Field(0.1, ge=0, le=1)
    """Share of the weight that goes by how long ago a level was played."""
    new: float | None = Field(None, ge=0, lt=1)
    """Share of episodes in levels that were not played yet, while there are any; by default their share of all."""


class ParameterConfig(SamplerConfig):
    """One entry of `environment.parameters`: a sampler, lessons, or levels that are replayed."""

    lessons: tuple[Annotated[LessonConfig, BeforeValidator(_lesson)], ...] = ()
    """In this order, forward and back."""
    replay: LevelReplayConfig | None = None
    """Levels that are replayed by priority."""

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
                raise ValueError(f"lesson {number} has no `until`, so that lesson {number + 1} would never begin")
            if last and lesson.until is not None:
                raise ValueError(f"lesson {number} is the last one, and has an `until`; leave it out, or add a lesson")
            if not number and lesson.back is not None:
                raise ValueError("lesson 0 has a `back`, and there is none before it; leave it out")
            if lesson.back is not None and lesson.back.measure == "progress":
                raise ValueError(f"lesson {number} goes back by progress, which never falls; use another measure")
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
        """Parameter → sampler, where this entry is called `name`; levels are drawn alike."""
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
    """What is drawn from in these lessons."""
    samplers: dict[str, Sampler] = {}
    for name, entry in parameters.items():
        samplers |= entry.samplers(name, lessons.get(name, 0))
    return ParameterTable(samplers, dict(lessons))


def evaluated_table(
    parameters: Mapping[str, ParameterConfig], instead: Mapping[str, SamplerConfig]
) -> ParameterTable | None:
    """What evaluations draw from: the last lessons, and each level alike; or what `evaluation.parameters` says."""
    if not parameters:
        return None
    last = {name: len(entry.lessons) - 1 for name, entry in parameters.items() if entry.lessons}
    table = table_at(parameters, last)
    return ParameterTable(table.samplers | {name: its.sampler for name, its in instead.items()}, last)
