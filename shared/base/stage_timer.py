"""Times of a thread by stage: a thread is in one stage at a time, and an inner stage interrupts the outer one.

`status` shows them through the heartbeat, and `shared/runtime/profile.py` writes them as a timeline.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from stagecoach.shared.base import world

OTHER = "other"


class Interval(NamedTuple):
    """One stay in a stage, those within it included; times are those of `world.nanoseconds`."""

    stage: str
    began: int
    ended: int


class StageTimer:
    """The clock of one thread; the thread enters and leaves stages, any thread may read."""

    def __init__(self) -> None:
        self._spent: dict[str, int] = {OTHER: 0}
        self._now, self._since = OTHER, world.nanoseconds()
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
        self._intervals = deque(maxlen=newest)

    @property
    def intervals(self) -> tuple[Interval, ...]:
        return tuple(self._intervals or ())

    def nanoseconds(self, stage: str) -> int:
        return self._spent.get(stage, 0)

    def seconds(self) -> dict[str, float]:
        """Stage → seconds so far, the present stay included; together they are all the time since the clock began."""
        while True:
            now, since = self._now, self._since
            spent = dict(self._spent)
            if since == self._since:  # else it moved on meanwhile, and a stay would be counted twice or not at all
                break
        spent[now] = spent.get(now, 0) + world.nanoseconds() - since
        return {stage: value / 1e9 for stage, value in spent.items()}


class Stage:
    """One stage of one clock; may be entered again within itself."""

    def __init__(self, stages: StageTimer, name: str) -> None:
        self._stages, self._name = stages, name
        self._outer: list[tuple[str, int]] = []

    def __enter__(self) -> None:
        stages, now = self._stages, world.nanoseconds()
        stages._spent[stages._now] += now - stages._since
        self._outer.append((stages._now, now))
        stages._now, stages._since = self._name, now

    def __exit__(self, *_: object) -> None:
        stages, now = self._stages, world.nanoseconds()
        stages._spent[self._name] += now - stages._since
        outer, began = self._outer.pop()
        stages._now, stages._since = outer, now
        if stages._intervals is not None:
            stages._intervals.append(Interval(self._name, began, now))
