"""Values that change over a run, as functions of the trainer's counters.

A schedule never looks at a clock nor at the number of workers: the same counters give the same value everywhere.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from shared.steps import Counters, DurationField


class Schedule(BaseModel):
    """From `start` to `end` while `over` passes; `end` afterwards. A plain number in the config is constant."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    kind: Literal["constant", "linear"] = "constant"
    """`constant` keeps `start`; `linear` goes straight from `start` to `end`."""
    start: float
    """The value at the beginning."""
    end: float = 0.0
    """The value when `over` has passed (ignored by `constant`)."""
    over: DurationField | None = None
    """How long the change takes; needed by `linear`."""

    @model_validator(mode="after")
    def _linear_takes_time(self) -> Self:
        if self.kind == "linear" and (self.over is None or not self.over.amount):
            raise ValueError("a linear schedule needs 'over', for example over: '100000 env_steps'")
        return self

    def value(self, counters: Counters) -> float:
        """The value at these counters."""
        if self.kind == "constant" or self.over is None:
            return self.start
        progress = min(1.0, counters.get(self.over.unit) / self.over.amount)
        return self.start + (self.end - self.start) * progress


def _from_number(value: object) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"kind": "constant", "start": float(value)}
    return value


ScheduleField = Annotated[Schedule, BeforeValidator(_from_number)]
"""A number, or a `Schedule`, as a config field."""
