"""Base of all config sections, and values that change during a run.

Such values are functions of the trainer's counters, never of a clock or the number of workers, so that the same
counters give the same value everywhere.
"""

import itertools
import math
from typing import Annotated, Any, Literal, Self, Union, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from stagecoach.shared.experience.counters import Counters, DurationField

Width = Annotated[int, Field(ge=1, le=1 << 16)]
"""Units of a network's layer. The widest in practice have thousands; a square layer at the bound takes 17 GB."""


def _some_number(value: float | tuple[float, ...]) -> float | tuple[float, ...]:
    if value == ():
        raise ValueError("it is an empty list; give a number, or one for each element of the goal")
    return value


Numbers = Annotated[float | tuple[float, ...], AfterValidator(_some_number)]
_Distance = Annotated[float, Field(ge=0)]
Distances = Annotated[_Distance | tuple[_Distance, ...], AfterValidator(_some_number)]
"""Distance within which a goal is achieved: Euclidean, or one limit per element."""


class Section(BaseModel):
    """Base of all config sections: immutable, and unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False,
        ser_json_inf_nan="constants",
    )  # fmt: skip

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Documents a field by its docstring, that of the field it overrides, or the first paragraph of the class's."""
        for name, field in cls.model_fields.items():
            overridden = (base.model_fields.get(name) for base in cls.__mro__[1:] if issubclass(base, BaseModel))
            told = (found.description for found in overridden if found is not None and found.description)
            field.description = field.description or next(told, (cls.__doc__ or "").partition("\n\n")[0])

    @model_validator(mode="before")
    @classmethod
    def _true_is_no_number(cls, data: Any) -> Any:
        """Rejects `true` for a number, which pydantic takes for 1."""
        for name, value in data.items() if isinstance(data, dict) else ():
            field = cls.model_fields.get(name)
            if isinstance(value, bool) and field is not None:
                kinds = {field.annotation, *get_args(field.annotation)}
                if kinds & {int, float} and bool not in kinds:
                    raise ValueError(f"{name}: expected a number, found {str(value).lower()}")
        return data

    @model_validator(mode="before")
    @classmethod
    def _kind_of_the_default(cls, data: Any) -> Any:
        """Completes a section without a `kind` from the default: `replay_buffer: {capacity: 1000}`."""
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
"""Placeholder in `kind` for the import path of a custom class."""


class _AnyOf:
    """Schema of a union: `anyOf` in place of `oneOf`, since a section without a `kind` fits several."""

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> Any:
        schema = handler(core)
        return {"anyOf" if name == "oneOf" else name: value for name, value in schema.items()}


def by_kind(union: Any) -> Any:
    """Returns the config field's type for a union of sections that differ in `kind`."""

    def kind_of(value: Any) -> Any:
        kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
        return OWN_KIND if isinstance(kind, str) and ":" in kind else kind

    sections = get_args(union)
    first, *others = [Annotated[section, Tag(section.model_fields["kind"].default)] for section in sections]
    return Annotated[Union[(first, *others)], Discriminator(kind_of), _AnyOf()]


def short_for(field: str, *kinds: type) -> BeforeValidator:
    """Accepts a plain value of these types for a section, as the value of this field."""
    return BeforeValidator(
        lambda value: {field: value} if isinstance(value, kinds) and not isinstance(value, bool) else value
    )


OFF = BeforeValidator(lambda value: "off" if value is False else value)
"""Accepts YAML's `off`, which is read as false."""


def leaves(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns dotted path → value, for everything except mappings."""
    found: dict[str, Any] = {}
    for name, value in data.items():
        path = f"{prefix}{name}"
        found |= leaves(value, f"{path}.") if isinstance(value, dict) and value else {path: value}
    return found


class Schedule(Section):
    """A value that changes from `start` to `end` during `over`, and then stays. A plain number in the config is
    constant."""

    kind: Literal["constant", "linear", "exponential", "cosine", "piecewise"] = "constant"
    """Shape of the change. `constant` keeps `start`; `linear` is straight; `exponential` changes by equal factors in
    equal parts of `over`; `cosine` is slow at both ends; `piecewise` is linear from `start` through each of
    `points`."""
    start: float
    """Initial value."""
    end: float = 0.0
    """Final value (ignored by `constant` and `piecewise`)."""
    over: DurationField | None = None
    """Duration of the change; required by `linear`, `exponential` and `cosine`."""
    points: tuple[tuple[DurationField, float], ...] = ()
    """Times and values of `piecewise`, as in `[[10000 env_steps, 0.1], [50000 env_steps, 0.01]]`."""

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
        """Smallest value, which is at a corner."""
        if self.kind == "constant":
            return self.start
        return min(self.start, *([value for _, value in self.points] or [self.end]))

    def value(self, counters: Counters) -> float:
        """Returns the value at these counters."""
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
        raise ValueError(f"expected 0 or more, found {schedule.least:g}")
    return schedule


ScheduleField = Annotated[Schedule, short_for("start", int, float), AfterValidator(_never_negative)]
"""A number or a `Schedule`, never negative, as a config field: step sizes, bounds, probabilities and noise."""
