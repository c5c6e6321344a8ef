"""Stage times are exclusive, complete and safe to read from other threads."""

from __future__ import annotations

import threading
import time

import pytest

from stagecoach.shared.base.stage_timer import OTHER, Interval, StageTimer


class Clock:
    """Nanoseconds that pass only when told to."""

    now = 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("stagecoach.shared.base.world.nanoseconds", lambda: clock.now)
    return clock


def test_inner_stage_interrupts_outer_stage(clock: Clock) -> None:
    stages = StageTimer()
    clock.now = 1_000
    with stages.during("outer"):
        clock.now = 3_000
        assert stages.seconds()["outer"] == 2e-6, "the present stay counts as far as it has come"
        with stages.during("inner"):
            clock.now = 10_000
        clock.now = 11_000
    clock.now = 11_500
    assert stages.seconds() == {OTHER: 1.5e-6, "outer": 3e-6, "inner": 7e-6}
    assert stages.nanoseconds("inner") == 7_000 and stages.nanoseconds("never") == 0


def test_stage_can_be_reentered_and_left_by_exception(clock: Clock) -> None:
    stages = StageTimer()

    def fail() -> None:
        with stages.during("again"):
            clock.now = 1
            with stages.during("again"):
                clock.now = 3
                raise KeyError

    with pytest.raises(KeyError):
        fail()
    clock.now = 5
    assert stages.nanoseconds("again") == 3 and stages.nanoseconds(OTHER) == 0
    assert stages.seconds()[OTHER] == pytest.approx(2e-9)


def test_stage_timer_records_newest_intervals_only(clock: Clock) -> None:
    stages = StageTimer()
    with stages.during("before"):
        clock.now = 1
    assert not stages.intervals
    stages.record(2)
    for _ in range(3):
        with stages.during("turn"):
            clock.now += 10
    assert stages.intervals == (Interval("turn", 11, 21), Interval("turn", 21, 31))


def test_stage_timer_reads_are_consistent_across_threads() -> None:
    """Beside a thread that changes its stage all the time, every reading is the clock's whole life."""
    before_it = time.perf_counter()
    stages, stop = StageTimer(), threading.Event()
    began = time.perf_counter()

    def work() -> None:
        while not stop.is_set():
            for name in ("a", "b", "c"):
                with stages.during(name):
                    pass

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(300):
            before = time.perf_counter() - began
            whole = sum(stages.seconds().values())
            after = time.perf_counter() - before_it
            assert before - 0.001 <= whole <= after + 0.001
    finally:
        stop.set()
        thread.join()
