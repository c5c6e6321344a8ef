"""The clock of stages: exclusive, whole, safe to read, and with intervals where they are asked for."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from stagecoach.shared.base.stage_timer import OTHER, Interval, StageTimer
from stagecoach.shared.runtime.profile import Profile
from stagecoach.shared.storage.object_store import FileStore


class Clock:
    """Nanoseconds that pass only when told to."""

    now = 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("stagecoach.shared.base.stage_timer.time.perf_counter_ns", lambda: clock.now)
    return clock


def test_an_inner_stage_interrupts_the_outer_one(clock: Clock) -> None:
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


def test_a_stage_may_be_entered_within_itself_and_left_by_an_exception(clock: Clock) -> None:
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


def test_only_the_newest_intervals_are_kept_and_only_where_they_are_recorded(clock: Clock) -> None:
    stages = StageTimer()
    with stages.during("before"):
        clock.now = 1
    assert not stages.intervals
    stages.record(2)
    for _ in range(3):
        with stages.during("turn"):
            clock.now += 10
    assert stages.intervals == (Interval("turn", 11, 21), Interval("turn", 21, 31))


def test_a_reader_never_sees_time_that_is_missing_or_counted_twice() -> None:
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


def test_a_profile_is_a_trace_with_a_line_for_each_thread_where_it_is_on(tmp_path: Path) -> None:
    store, acting, publishing = FileStore(tmp_path, "run"), StageTimer(), StageTimer()
    off = Profile(store, "trainer", on=False)
    stages = off.add("training", StageTimer())
    with stages.during("update"):
        pass
    off.write()
    assert store.keys("profile/") == [] and stages.intervals == ()
    profile = Profile(store, "trainer", on=True)
    assert profile.add("training", acting) is acting
    profile.add("publishing", publishing)
    with acting.during("update"), publishing.during("upload"):
        time.sleep(0.01)
    profile.write()
    (key,) = store.keys("profile/")
    data = json.loads(store.get(key))
    spans = {event["name"]: event for event in data["traceEvents"] if event["ph"] == "X"}
    assert spans.keys() == {"update", "upload"} and spans["update"]["tid"] != spans["upload"]["tid"]
    assert spans["update"]["dur"] >= 10_000  # microseconds
    assert abs(spans["update"]["ts"] / 1e6 - time.time()) < 60
    assert data["otherData"]["seconds"]["training"]["update"] >= 0.01
