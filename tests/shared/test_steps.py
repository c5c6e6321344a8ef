"""Durations and counters: what the config may say, and how far a run has come."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.steps import UNITS, Counters, Duration, Phase, PhaseCounters, Unit, parse_duration


@settings(deadline=None, derandomize=True)
@given(amount=st.integers(0, 10**15), unit=st.sampled_from(UNITS))
def test_a_duration_reads_what_it_writes(amount: int, unit: Unit) -> None:
    assert parse_duration(str(Duration(amount, unit))) == Duration(amount, unit)


def test_large_amounts_may_have_underscores_and_spaces() -> None:
    assert parse_duration("  1_000_000   env_steps ") == Duration(1_000_000, "env_steps")


OTHER_FORMS = ["10", "updates", "10 minutes", "-1 updates", "1.5 updates", "1e3 updates", "10updates", "", 10, None]


@pytest.mark.parametrize("text", OTHER_FORMS)
def test_other_forms_are_refused_and_the_right_one_shown(text: object) -> None:
    expected = f"expected '<number> <env_steps|episodes|updates>' such as '10 updates', found {text!r}"
    with pytest.raises(ValueError, match=re.escape(expected)):
        parse_duration(text)


@pytest.mark.parametrize("unit", UNITS)
def test_a_duration_looks_at_its_own_counter_only(unit: Unit) -> None:
    others = Counters(**{name: 1000 for name in UNITS if name != unit})
    assert not Duration(1, unit).reached(others)
    assert Duration(1, unit).index(others) == 0
    assert Duration(7, unit).reached(Counters(**{unit: 7}))
    assert not Duration(7, unit).reached(Counters(**{unit: 6}))
    assert [Duration(7, unit).index(Counters(**{unit: count})) for count in (0, 6, 7, 13, 14)] == [0, 0, 1, 1, 2]


def test_an_empty_duration_is_over_at_once() -> None:
    assert Duration(0, "updates").reached(Counters())
    assert Duration(0, "updates").index(Counters(updates=5)) == 0


def test_counters_are_kept_per_phase_and_travel_through_json() -> None:
    counters = PhaseCounters()
    counters.of(Phase.HEATUP).env_steps += 5
    counters.of(Phase.TRAIN).updates += 2
    found = PhaseCounters.from_dict(json.loads(json.dumps(counters.as_dict())))
    assert found == counters
    assert (found.heatup.env_steps, found.train.env_steps, found.train.get("updates")) == (5, 0, 2)


def test_evaluation_has_no_counters_here() -> None:
    with pytest.raises(KeyError):
        PhaseCounters().of(Phase.TEST)
