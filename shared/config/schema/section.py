"""What every section of the configuration is made of, and values that change over a run: functions of the trainer's
counters, never of a clock or the number of workers, so that the same counters give the same value everywhere."""

import itertools
import math
from typing import Annotated, Any, Literal, Self, Union, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from stagecoach.shared.experience.counters import Counters, DurationField

Width = Annotated[int, Field(ge=1, le=1 << 16)]
"""Units of a network's layer. The widest in use have some thousands; a square layer of the bound is 17 GB."""


def _some_number(value: float | tuple[float, ...]) -> float | tuple[float, ...]:
    if value == ():
        raise ValueError("it is an empty list; give a number, or one for each element of the goal")
    return value


Numbers = Annotated[float | tuple[float, ...], AfterValidator(_some_number)]
_Distance = Annotated[float, Field(ge=0)]
Distances = Annotated[_Distance | tuple[_Distance, ...], AfterValidator(_some_number)]
"""How near a goal is achieved: a Euclidean distance, or one for each element."""


class Section(BaseModel):
    """Base of all config sections: immutable, and a key that does not exist is an error."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        ser_json_inf_nan="constants",
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """A field without a docstring has that of the field it overrides, else the first paragraph of the class's."""
        for name, field in cls.model_fields.items():
            overridden = (base.model_fields.get(name) for base in cls.__mro__[1:] if issubclass(base, BaseModel))
            told = (found.description for found in overridden if found is not None and found.description)
            field.description = field.description or next(told, (cls.__doc__ or "").partition("\n\n")[0])

    @model_validator(mode="before")
    @classmethod
    def _true_is_no_number(cls, data: Any) -> Any:
        """Pydantic takes `true` for 1, so that `num_envs: true` would be one environment."""
        for name, value in data.items() if isinstance(data, dict) else ():
            field = cls.model_fields.get(name)
            if isinstance(value, bool) and field is not None:
                kinds = {field.annotation, *get_args(field.annotation)}
                if kinds & {int, float} and bool not in kinds:
                    raise ValueError(f"{name} is a number, found {str(value).lower()}")
        return data

    @model_validator(mode="before")
    @classmethod
    def _kind_of_the_default(cls, data: Any) -> Any:
        """`replay_buffer: {capacity: 1000}` is of the default's kind, and what it does not say is as in the default."""
        if not isinstance(data, dict):
            return data
        completed = dict(data)
        for name, field in cls.model_fields.items():
            given, default = data.get(name), field.default
            if not isinstance(default, Section) or not isinstance(given, dict) or "kind" in given:
                continue
            kind = type(default).model_fields.get("kind")
            if kind is not None and any(isinstance(item, Discriminator) for item in field.metadata):
                completed[name] = {"kind": kind.default, **default.model_dump(exclude_unset=True), **given}
        return completed


OWN_KIND = "module:Class"
"""The `kind` of sections for a class of the user's, in whose place its path stands."""


class _AnyOf:
    """A section without a `kind`, which may be that of the default, fits several of a union: `oneOf` refuses it."""

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> Any:
        schema = handler(core)
        return {"anyOf" if name == "oneOf" else name: value for name, value in schema.items()}


def by_kind(union: Any) -> Any:
    """Sections of which `kind` says which it is, as the type of a config field."""

    def kind_of(value: Any) -> Any:
        kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
        return OWN_KIND if isinstance(kind, str) and ":" in kind else kind

    sections = get_args(union)
    first, *others = [Annotated[section, Tag(section.model_fields["kind"].default)] for section in sections]
    return Annotated[Union[(first, *others)], Discriminator(kind_of), _AnyOf()]


def short_for(field: str, *kinds: type) -> BeforeValidator:
    """Lets a plain value of these types stand for the section of which it is this field."""
    return BeforeValidator(
        lambda value: {field: value} if isinstance(value, kinds) and not isinstance(value, bool) else value
    )


OFF = BeforeValidator(lambda value: "off" if value is False else value)
"""For fields that may be `off`, which YAML reads as false."""


def leaves(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted path → value, of everything that is no mapping."""
    found: dict[str, Any] = {}
    for name, value in data.items():
        path = f"{prefix}{name}"
        found |= leaves(value, f"{path}.") if isinstance(value, dict) and value else {path: value}
    return found


class Schedule(Section):
    """From `start` to `end` while `over` passes; `end` afterwards. A plain number in the config is constant."""

    kind: Literal["constant", "linear", "exponential", "cosine", "piecewise"] = "constant"
    """`constant` keeps `start`; from `start` to `end`, `linear` goes straight, `exponential` by equal factors in equal
    parts of `over`, and `cosine` slowly at both ends; `piecewise` goes straight from `start` to each of `points`."""
    start: float
    """The value at the beginning."""
    end: float = 0.0
    """The value when `over` has passed (ignored by `constant` and `piecewise`)."""
    over: DurationField | None = None
    """How long the change takes; needed by `linear`, `exponential` and `cosine`."""
    points: tuple[tuple[DurationField, float], ...] = ()
    """For `piecewise`: when it reaches which value, as `[[10000 env_steps, 0.1], [50000 env_steps, 0.01]]`."""

    @model_validator(mode="after")
    def _takes_time(self) -> Self:
        if self.kind in {"linear", "exponential", "cosine"} and (self.over is None or not self.over.amount):
            raise ValueError(f"a {self.kind} schedule needs 'over', for example over: '100000 env_steps'")
        if self.kind == "exponential" and self.start * self.end <= 0:
            raise ValueError(
                f"an exponential schedule never gets from start={self.start:g} to end={self.end:g}: both must be above "
                f"0 (or both below)"
            )
        return self

    @model_validator(mode="after")
    def _points_follow_each_other(self) -> Self:
        if (self.kind == "piecewise") != bool(self.points):
            raise ValueError("'points' belong to a piecewise schedule, which needs at least one")
        whens = [when for when, _ in self.points]
        if len({when.unit for when in whens}) > 1:
            raise ValueError(f"the points of a schedule must have one unit, found {', '.join(map(str, whens))}")
        amounts = [0, *(when.amount for when in whens)]
        if any(late <= early for early, late in itertools.pairwise(amounts)):
            raise ValueError(f"the points of a schedule must come later and later, found {', '.join(map(str, whens))}")
        return self

    @property
    def least(self) -> float:
        """The smallest value it ever has: between its corners it only rises or only falls."""
        if self.kind == "constant":
            return self.start
        return min(self.start, *([value for _, value in self.points] or [self.end]))

    def value(self, counters: Counters) -> float:
        """The value at these counters."""
        if self.kind == "piecewise":
            return self._between_points(counters)
        if self.kind == "constant" or self.over is None:
            return self.start
        progress = min(1.0, counters.get(self.over.unit) / self.over.amount)
        if self.kind == "exponential":
            return self.start * math.pow(self.end / self.start, progress)
        if self.kind == "cosine":
            progress = (1 - math.cos(math.pi * progress)) / 2
        return self.start + (self.end - self.start) * progress

    def _between_points(self, counters: Counters) -> float:
        began, value = 0, self.start
        for when, reached in self.points:
            at = counters.get(when.unit)
            if at < when.amount:
                return value + (reached - value) * (at - began) / (when.amount - began)
            began, value = when.amount, reached
        return value


def _never_negative(schedule: Schedule) -> Schedule:
    if schedule.least < 0:
        raise ValueError(f"it must never be below 0, and would come to {schedule.least:g}")
    return schedule


ScheduleField = Annotated[Schedule, short_for("start", int, float), AfterValidator(_never_negative)]
"""A number, or a `Schedule`, as a config field; step sizes, bounds, probabilities and noise are never negative."""
