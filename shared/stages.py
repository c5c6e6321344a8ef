"""Where a thread's time goes: at any moment it is in one stage, and inner stages interrupt outer ones.

Counted always (a quarter of a microsecond for each change), shown by `status` through the heartbeat. With `record` it
also keeps the newest intervals, of which `shared/profile.py` makes a timeline.
"""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType
from typing import NamedTuple

OTHER = "other"
"""Between the named stages."""


class Interval(NamedTuple):
    """One stay in a stage, those within it included."""

    stage: str
    began: int
    """Nanoseconds of `time.perf_counter_ns`."""
    ended: int


class Stages:
    """The clock of one thread; the thread enters and leaves stages, any thread may read."""

    def __init__(self) -> None:
        self._spent: dict[str, int] = {OTHER: 0}
        self._now, self._since = OTHER, time.perf_counter_ns()
        self._handles: dict[str, Stage] = {}
        self._intervals: deque[Interval] | None = None

    def during(self, stage: str) -> Stage:
        """`with stages.during("push"):` counts as this stage what happens within, except in inner stages."""
        handle = self._handles.get(stage)
        if handle is None:
            self._spent.setdefault(stage, 0)
            handle = self._handles[stage] = Stage(self, stage)
        return handle

    def record(self, newest: int) -> None:
        """From now on keeps so many intervals."""
        self._intervals = deque(maxlen=newest)

    @property
    def intervals(self) -> tuple[Interval, ...]:
        """What was recorded, in the order in which the stages ended."""
        return tuple(self._intervals or ())

    def nanoseconds(self, stage: str) -> int:
        """Spent in finished stays so far."""
        return self._spent.get(stage, 0)

    def seconds(self) -> dict[str, float]:
        """Stage → seconds so far, the present stay included; together they are the clock's whole life."""
        while True:
            now, since = self._now, self._since
            spent = dict(self._spent)
            if since == self._since:  # else it moved on meanwhile, and a stay would be counted twice or not at all
                break
        spent[now] = spent.get(now, 0) + time.perf_counter_ns() - since
        return {stage: value / 1e9 for stage, value in spent.items()}


class Stage:
    """One stage of one clock; may be entered again within itself."""

    def __init__(self, stages: Stages, name: str) -> None:
        self._stages, self._name = stages, name
        self._outer: list[tuple[str, int]] = []

    def __enter__(self) -> None:
        stages, now = self._stages, time.perf_counter_ns()
        stages._spent[stages._now] += now - stages._since
        self._outer.append((stages._now, now))
        stages._now, stages._since = self._name, now

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stages, now = self._stages, time.perf_counter_ns()
        stages._spent[self._name] += now - stages._since
        outer, began = self._outer.pop()
        stages._now, stages._since = outer, now
        if stages._intervals is not None:
            stages._intervals.append(Interval(self._name, began, now))
