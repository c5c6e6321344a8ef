"""The limits benchmark, small: every line has a figure, and the parts of the framework's cost are what they say."""

from __future__ import annotations

import time
from functools import partial

import pytest

from benchmarks.suite.framework_cost import CLOCKS, FRAMEWORK, TRAINER_PARTS, WORKER_PARTS, Clock
from tests.benchmarks.conftest import MeasureQuickly

pytestmark = pytest.mark.timeout(300)


def _busy(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_every_line_has_a_figure_and_the_two_roles_tell_all_their_parts(measure_quickly: MeasureQuickly) -> None:
    result = measure_quickly("limits")
    assert all(len(line.samples) == 1 for line in result.measures)
    of_framework = {f"worker: {part}" for part in (*WORKER_PARTS, FRAMEWORK)}
    of_framework |= {f"trainer: {part}" for part in (*TRAINER_PARTS, FRAMEWORK)}
    found = {line.what: line.samples[0] for line in result.measures}
    assert of_framework <= set(found)
    assert all(value > 0 for what, value in found.items() if "guards" not in what), found
    aims = {line.what: line.aim for line in result.measures if line.aim is not None}
    assert aims == {"worker: framework": 1.0, "trainer: framework": 0.5}
    assert found[f"worker: {CLOCKS}"] < found["worker: framework"]


def test_only_what_is_asked_for_is_measured(measure_quickly: MeasureQuickly) -> None:
    result = measure_quickly("limits", "memory: copy")
    assert [line.what for line in result.measures] == ["memory: copy"]


def test_a_clock_counts_a_call_within_a_call_once() -> None:
    clock = Clock()
    inner = clock.around("inner", partial(_busy, 0.02))

    def act() -> None:
        inner()
        _busy(0.01)

    outer = clock.around("outer", act)

    def update() -> None:
        outer()
        _busy(0.02)

    clock.inner("rest", update)()
    assert set(clock.seconds) == {"outer", "rest"}
    assert clock.seconds["outer"] == pytest.approx(0.03, rel=0.3)
    assert clock.seconds["rest"] == pytest.approx(0.02, rel=0.3)
