"""Durations, counters, and schedules: values that change with the trainer's counters, as the config may give them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from stagecoach.shared.config.schema.section import Schedule, ScheduleField
from stagecoach.shared.experience.counters import UNITS, Counters, Duration, Unit, parse_duration

FIELD: TypeAdapter[Schedule] = TypeAdapter(ScheduleField)


@pytest.mark.parametrize(
    ("schedule", "counts", "values"),
    [
        (3e-4, [0, 1, 10**6], [3e-4] * 3),
        ({"kind": "linear", "start": 1.0, "end": 0.2, "over": "100 updates"}, [0, 25, 50, 100, 999],
         [1, 0.8, 0.6, 0.2, 0.2]),
        ({"kind": "exponential", "start": 1.0, "end": 0.01, "over": "100 updates"},
         [0, 25, 50, 75, 100, 999], [1, 10**-0.5, 0.1, 10**-1.5, 0.01, 0.01]),
        ({"kind": "constant", "start": 2.0, "end": -1.0}, [0, 999], [2, 2]),
        ({"kind": "cosine", "start": 3.0, "end": 1.0, "over": "60 updates"}, [0, 20, 30, 40, 60, 999],
         [3, 2.5, 2, 1.5, 1, 1]),
        ({"kind": "cosine", "start": 1.0, "end": 3.0, "over": "60 updates"}, [0, 30, 60], [1, 2, 3]),
        ({"kind": "piecewise", "start": 1, "points": [["10 updates", 0.5], ["20 updates", 0.5], ["30 updates", 2]]},
         [0, 5, 10, 15, 20, 25, 30, 999], [1, 0.75, 0.5, 0.5, 0.5, 1.25, 2, 2]),
    ],
    ids=lambda value: value["kind"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_schedule_kinds_have_their_values(schedule: Any, counts: list[int], values: list[float]) -> None:
    made = FIELD.validate_python(schedule)
    assert made.value(Counters(env_steps=10**9, episodes=10**9)) == values[0], "another unit does not count"
    assert [made.value(Counters(updates=count)) for count in counts] == pytest.approx(values)
    assert FIELD.validate_python(FIELD.dump_python(made, mode="json")) == made
    assert made.least == min(values)


@settings(derandomize=True)
@given(
    kind=st.sampled_from(["linear", "exponential", "cosine", "piecewise"]),
    start=st.floats(1e-6, 1e6), end=st.floats(1e-6, 1e6), sign=st.sampled_from([1, -1]),
    counts=st.tuples(st.integers(0, 200), st.integers(0, 200)),
)  # fmt: skip
def test_schedules_are_monotonic_and_bounded(
    kind: str, start: float, end: float, sign: int, counts: tuple[int, int]
) -> None:
    if kind != "exponential":  # which has no way to the other side of 0
        end *= sign
    way = {"points": [["100 updates", end]]} if kind == "piecewise" else {"end": end, "over": "100 updates"}
    schedule = Schedule.model_validate({"kind": kind, "start": start, **way})
    early, late = (schedule.value(Counters(updates=count)) for count in sorted(counts))
    (low, high), tolerance = sorted((start, end)), 1e-9 * (start + abs(end))
    assert low - tolerance <= min(early, late) and max(early, late) <= high + tolerance
    assert (late - early) * (end - start) >= -1e-6 * abs(end - start)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"kind": "linear", "start": 1.0}, "a linear schedule needs 'over'"),
        ({"kind": "linear", "start": 1.0, "over": None}, "a linear schedule needs 'over'"),
        ({"kind": "linear", "start": 1.0, "over": "0 updates"}, "a linear schedule needs 'over'"),
        ({"kind": "exponential", "start": 1.0, "end": 0.5}, "exponential schedule needs 'over'"),
        ({"kind": "cosine", "start": 1.0, "end": 0.5}, "a cosine schedule needs 'over'"),
        ({"kind": "exponential", "start": 1, "end": 0, "over": "5 updates"}, "both must be above 0"),
        ({"kind": "exponential", "start": 1, "end": -1, "over": "5 updates"}, "both must be above 0"),
        ({"kind": "piecewise", "start": 1}, "needs at least one"),
        ({"kind": "linear", "start": 1, "over": "5 updates", "points": [["5 updates", 1]]}, "belong to a piecewise"),
        ({"kind": "piecewise", "start": 1, "points": [["5 updates", 1], ["9 episodes", 0]]}, "must have one unit"),
        ({"kind": "piecewise", "start": 1, "points": [["5 updates", 1], ["5 updates", 0]]}, "later and later"),
        ({"kind": "piecewise", "start": 1, "points": [["0 updates", 1]]}, "later and later"),
        *((other, ".") for other in (
            True, "fast", None, [1], {}, {"end": 1}, {"start": True}, {"start": 1, "stop": 2}, float("nan"),
            float("inf"), {"start": 1, "kind": "cosine"}, {"kind": "linear", "start": 1, "over": "5 minutes"})),
    ],
    ids=str,
)  # fmt: skip
def test_invalid_schedules_are_rejected(value: object, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        FIELD.validate_python(value)


@settings(derandomize=True)
@given(amount=st.integers(0, 10**15), unit=st.sampled_from(UNITS))
def test_duration_round_trips(amount: int, unit: Unit) -> None:
    assert parse_duration(str(Duration(amount, unit))) == Duration(amount, unit)
    assert parse_duration(f"  {amount:_}   {unit} ") == Duration(amount, unit)


def test_invalid_durations_are_rejected_with_example() -> None:
    others = ("10", "updates", "10 minutes", "-1 updates", "1.5 updates", "1e3 updates", "10updates", "", 10, None)
    for text in others:
        expected = (
            f"expected '<number> <env_steps|episodes|updates|gradient_steps>' such as '10 updates', found {text!r}"
        )
        with pytest.raises(ValueError, match=re.escape(expected)):
            parse_duration(text)


@pytest.mark.parametrize("unit", UNITS)
def test_duration_depends_on_its_counter_only(unit: Unit) -> None:
    assert Duration(0, unit).reached(Counters()) and Duration(0, unit).index(Counters(**{unit: 5})) == 0
    others = Counters(**{name: 1000 for name in UNITS if name != unit})
    assert not Duration(1, unit).reached(others)
    assert Duration(1, unit).index(others) == 0
    assert Duration(7, unit).reached(Counters(**{unit: 7}))
    assert not Duration(7, unit).reached(Counters(**{unit: 6}))
    assert [Duration(7, unit).index(Counters(**{unit: count})) for count in (0, 6, 7, 13, 14)] == [0, 0, 1, 1, 2]
