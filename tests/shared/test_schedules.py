"""Schedules: values that change with the trainer's counters, and the forms that the config may give them in."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from shared.schedules import Schedule, ScheduleField
from shared.steps import Counters, Duration

FIELD: TypeAdapter[Schedule] = TypeAdapter(ScheduleField)


def test_a_number_stays_what_it_is() -> None:
    schedule = FIELD.validate_python(3e-4)
    assert {schedule.value(Counters(updates=count, env_steps=10**9)) for count in (0, 1, 10**6)} == {3e-4}


def test_a_linear_schedule_goes_straight_and_then_stays() -> None:
    schedule = FIELD.validate_python({"kind": "linear", "start": 1.0, "end": 0.2, "over": "100 updates"})
    values = [schedule.value(Counters(updates=count)) for count in (0, 25, 50, 100, 1000)]
    assert values == pytest.approx([1.0, 0.8, 0.6, 0.2, 0.2])
    assert schedule.value(Counters(env_steps=10**9, episodes=10**9)) == 1.0


@settings(deadline=None, derandomize=True)
@given(
    start=st.floats(-1e6, 1e6),
    end=st.floats(-1e6, 1e6),
    amount=st.integers(1, 10**9),
    counts=st.tuples(st.integers(0, 10**10), st.integers(0, 10**10)),
)
def test_a_linear_schedule_never_leaves_its_ends_and_never_turns(
    start: float, end: float, amount: int, counts: tuple[int, int]
) -> None:
    schedule = Schedule(kind="linear", start=start, end=end, over=Duration(amount, "env_steps"))
    early, late = (schedule.value(Counters(env_steps=count)) for count in sorted(counts))
    tolerance = 1e-6
    assert min(start, end) - tolerance <= min(early, late)
    assert max(early, late) <= max(start, end) + tolerance
    assert (late - early) * (end - start) >= -tolerance * abs(end - start)


@pytest.mark.parametrize(
    "value",
    [
        {"kind": "linear", "start": 1.0},
        {"kind": "linear", "start": 1.0, "over": None},
        {"kind": "linear", "start": 1.0, "over": "0 updates"},
    ],
    ids=str,
)
def test_a_linear_schedule_must_say_how_long_it_takes(value: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="a linear schedule needs 'over'"):
        FIELD.validate_python(value)


@pytest.mark.parametrize(
    "value", [True, "fast", None, [1], {}, {"end": 1}, {"start": 1, "stop": 2}, float("nan"), float("inf"),
              {"start": 1, "kind": "cosine"}, {"kind": "linear", "start": 1, "over": "5 minutes"}], ids=str
)  # fmt: skip
def test_other_forms_are_refused(value: object) -> None:
    with pytest.raises(ValidationError):
        FIELD.validate_python(value)


@pytest.mark.parametrize("value", [0.5, {"kind": "linear", "start": 1, "end": 0.1, "over": "10 episodes"}], ids=str)
def test_a_schedule_reads_what_it_writes(value: object) -> None:
    schedule = FIELD.validate_python(value)
    assert FIELD.validate_python(FIELD.dump_python(schedule, mode="json")) == schedule
