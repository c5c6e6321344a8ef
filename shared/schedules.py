"""Values that change over a run, as functions of the trainer's counters.

A schedule never looks at a clock nor at the number of workers: the same counters give the same value everywhere.
"""

from __future__ import annotations

import itertools
import math
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, model_validator

from shared.steps import Counters, DurationField


class Schedule(BaseModel):
    """From `start` to `end` while `over` passes; `end` afterwards. A plain number in the config is constant."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    kind: Literal["constant", "linear", "exponential", "cosine", "piecewise"] = "constant"
    """`constant` keeps `start`; `linear` goes straight from `start` to `end`; `exponential` changes by equal factors in
    equal parts of `over`; `cosine` goes half a wave, slowly at both ends; `piecewise` goes straight from `start` to one
    of `points` after another."""
    start: float
    """The value at the beginning."""
    end: float = 0.0
    """The value when `over` has passed (ignored by `constant` and `piecewise`)."""
    over: DurationField | None = None
    """How long the change takes; needed by `linear`, `exponential` and `cosine`."""
    points: tuple[tuple[DurationField, float], ...] = ()
    """For `piecewise`: when which value is reached, as `[[10000 env_steps, 0.1], [50000 env_steps, 0.01]]`. The last
    one stays."""

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


def _from_number(value: object) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"kind": "constant", "start": value}
    return value


def _never_negative(schedule: Schedule) -> Schedule:
    if schedule.least < 0:
        raise ValueError(f"it must never be below 0, and would come to {schedule.least:g}")
    return schedule


ScheduleField = Annotated[Schedule, BeforeValidator(_from_number), AfterValidator(_never_negative)]
"""A number, or a `Schedule`, as a config field; step sizes, bounds, probabilities and noise are never negative."""
