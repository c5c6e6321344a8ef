"""Phases, counters and durations: the units in which a run is measured.

The trainer alone counts, per phase and from the log: an *env step* is one step of one environment (whatever the number
of agents in it), an *episode* one finished episode, an *update* one learning update, a *gradient step* one step of an
optimizer within it, as reported by the algorithm (`train/gradient_steps`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Literal, cast, get_args

from pydantic import AfterValidator, BeforeValidator, PlainSerializer, WithJsonSchema

Unit = Literal["env_steps", "episodes", "updates", "gradient_steps"]
UNITS: tuple[Unit, ...] = get_args(Unit)


class Phase(StrEnum):
    """Purpose of acting. TEST happens in the evaluator only and never reaches the log."""

    HEATUP = "heatup"
    TRAIN = "train"
    TEST = "test"


@dataclass
class Counters:
    env_steps: int = 0
    episodes: int = 0
    updates: int = 0
    gradient_steps: int = 0

    def get(self, unit: Unit) -> int:
        return int(vars(self)[unit])


@dataclass
class PhaseCounters:
    heatup: Counters = field(default_factory=Counters)
    train: Counters = field(default_factory=Counters)

    def of(self, phase: Phase) -> Counters:
        return {Phase.HEATUP: self.heatup, Phase.TRAIN: self.train}[phase]

    @property
    def env_steps(self) -> int:
        """Env steps of all phases."""
        return self.heatup.env_steps + self.train.env_steps

    def as_dict(self) -> dict[str, dict[str, int]]:
        return {"heatup": dict(vars(self.heatup)), "train": dict(vars(self.train))}

    @classmethod
    def from_dict(cls, data: dict[str, dict[str, int]]) -> PhaseCounters:
        return cls(Counters(**data["heatup"]), Counters(**data["train"]))


@dataclass(frozen=True)
class Duration:
    """An amount of one unit, written `"10 updates"`, `"20000 env_steps"` or `"50 episodes"` in the config."""

    amount: int
    unit: Unit

    def __str__(self) -> str:
        return f"{self.amount} {self.unit}"

    def reached(self, counters: Counters) -> bool:
        return counters.get(self.unit) >= self.amount

    def index(self, counters: Counters) -> int:
        """Returns the number of whole durations in `counters` (0 for an empty duration)."""
        return counters.get(self.unit) // self.amount if self.amount else 0


def parse_duration(value: object) -> object:
    """Parses `"10 updates"` as `Duration(10, "updates")`; raises `ValueError` with the expected form."""
    if isinstance(value, Duration):
        return value
    match = re.fullmatch(rf"\s*([\d_]+)\s+({'|'.join(UNITS)})\s*", value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"expected '<number> <{'|'.join(UNITS)}>' such as '10 updates', found {value!r}")
    return Duration(int(match[1]), cast(Unit, match[2]))


DurationField = Annotated[
    Duration,
    BeforeValidator(parse_duration),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string", "examples": ["10 updates"], "pattern": rf"^\d+ ({'|'.join(UNITS)})$"}),
]


def _at_least_one(duration: Duration) -> Duration:
    if not duration.amount:
        raise ValueError(f"expected at least 1, found {str(duration)!r}; give more, or leave it out")
    return duration


def _of_own_play(duration: Duration) -> Duration:
    if duration.unit not in ("env_steps", "episodes"):
        raise ValueError(f"{str(duration)!r} counts a learner's own play; use env_steps or episodes")
    return duration


AT_LEAST_ONE = AfterValidator(_at_least_one)
OwnPlay = Annotated[DurationField, AfterValidator(_of_own_play)]
