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


@pytest.mark.parametrize("kind", ["exponential", "cosine"])
def test_the_other_changes_take_time_too(kind: str) -> None:
    with pytest.raises(ValidationError, match=f"a {kind} schedule needs 'over'"):
        FIELD.validate_python({"kind": kind, "start": 1.0, "end": 0.5})


def values_of(schedule: dict[str, Any], counts: list[int]) -> list[float]:
    made = FIELD.validate_python(schedule)
    assert made.value(Counters(env_steps=10**9, episodes=10**9)) == schedule["start"], "another unit does not count"
    return [made.value(Counters(updates=count)) for count in counts]


def test_an_exponential_schedule_changes_by_equal_factors() -> None:
    schedule = {"kind": "exponential", "start": 1.0, "end": 0.01, "over": "100 updates"}
    assert values_of(schedule, [0, 25, 50, 75, 100, 999]) == pytest.approx([1, 10**-0.5, 0.1, 10**-1.5, 0.01, 0.01])


def test_a_cosine_schedule_is_slow_at_both_ends() -> None:
    schedule = {"kind": "cosine", "start": 3.0, "end": 1.0, "over": "60 updates"}
    assert values_of(schedule, [0, 20, 30, 40, 60, 999]) == pytest.approx([3.0, 2.5, 2.0, 1.5, 1.0, 1.0])


def test_a_piecewise_schedule_goes_straight_from_point_to_point() -> None:
    schedule = {
        "kind": "piecewise",
        "start": 1.0,
        "points": [["10 updates", 0.5], ["20 updates", 0.5], ["30 updates", 2]],
    }
    assert values_of(schedule, [0, 5, 10, 15, 20, 25, 30, 999]) == pytest.approx([1, 0.75, 0.5, 0.5, 0.5, 1.25, 2, 2])


@settings(deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(["exponential", "cosine", "piecewise"]),
    start=st.floats(1e-6, 1e6),
    end=st.floats(1e-6, 1e6),
    counts=st.tuples(st.integers(0, 200), st.integers(0, 200)),
)
def test_between_two_values_no_schedule_leaves_them_or_turns(
    kind: str, start: float, end: float, counts: tuple[int, int]
) -> None:
    way = {"points": [["100 updates", end]]} if kind == "piecewise" else {"end": end, "over": "100 updates"}
    schedule = FIELD.validate_python({"kind": kind, "start": start, **way})
    early, late = (schedule.value(Counters(updates=count)) for count in sorted(counts))
    low, high = sorted((start, end))
    assert low - 1e-9 * high <= min(early, late) and max(early, late) <= high * (1 + 1e-9)
    assert (late - early) * (end - start) >= -1e-6 * abs(end - start)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"kind": "exponential", "start": 1, "end": 0, "over": "5 updates"}, "both must be above 0"),
        ({"kind": "exponential", "start": 1, "end": -1, "over": "5 updates"}, "both must be above 0"),
        ({"kind": "piecewise", "start": 1}, "needs at least one"),
        ({"kind": "linear", "start": 1, "over": "5 updates", "points": [["5 updates", 1]]}, "belong to a piecewise"),
        ({"kind": "piecewise", "start": 1, "points": [["5 updates", 1], ["9 episodes", 0]]}, "must have one unit"),
        ({"kind": "piecewise", "start": 1, "points": [["5 updates", 1], ["5 updates", 0]]}, "later and later"),
        ({"kind": "piecewise", "start": 1, "points": [["0 updates", 1]]}, "later and later"),
    ],
    ids=str,
)
def test_what_no_schedule_can_do_is_said(value: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        FIELD.validate_python(value)


@pytest.mark.parametrize(
    "value", [True, "fast", None, [1], {}, {"end": 1}, {"start": 1, "stop": 2}, float("nan"), float("inf"),
              {"start": 1, "kind": "cosine"}, {"kind": "linear", "start": 1, "over": "5 minutes"}], ids=str
)  # fmt: skip
def test_other_forms_are_refused(value: object) -> None:
    with pytest.raises(ValidationError):
        FIELD.validate_python(value)


@pytest.mark.parametrize(
    "value",
    [
        0.5,
        {"kind": "linear", "start": 1, "end": 0.1, "over": "10 episodes"},
        {"kind": "cosine", "start": 1, "over": "10 episodes"},
        {"kind": "piecewise", "start": 1, "points": [["10 episodes", 0.1]]},
    ],
    ids=str,
)
def test_a_schedule_reads_what_it_writes(value: object) -> None:
    schedule = FIELD.validate_python(value)
    assert FIELD.validate_python(FIELD.dump_python(schedule, mode="json")) == schedule


@pytest.mark.parametrize(
    ("given", "least"),
    [
        (0.3, 0.3),
        ({"kind": "constant", "start": 2.0, "end": -1.0}, 2.0),
        ({"kind": "linear", "start": 1.0, "end": 0.2, "over": "10 updates"}, 0.2),
        ({"kind": "cosine", "start": 0.1, "end": 3.0, "over": "10 updates"}, 0.1),
        ({"kind": "exponential", "start": 1.0, "end": 0.01, "over": "10 updates"}, 0.01),
        ({"kind": "piecewise", "start": 1.0, "points": [["10 updates", 0.2], ["20 updates", 5.0]]}, 0.2),
    ],
)
def test_the_least_value_is_the_least_of_all_that_it_has(given: Any, least: float) -> None:
    schedule = FIELD.validate_python(given)
    assert schedule.least == least == pytest.approx(min(schedule.value(Counters(updates=at)) for at in range(40)))
