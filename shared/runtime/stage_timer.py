"""Where a thread's time goes: at any moment it is in one stage, and inner stages interrupt outer ones.

Shown by `status` through the heartbeat. With `metrics.profile` each process also writes its newest intervals to the
store when it ends, in the Trace Event format that Perfetto and speedscope open.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections import deque
from typing import Any, NamedTuple

from stagecoach.shared.errors import StagecoachError
from stagecoach.shared.storage.object_store import ObjectStore

OTHER = "other"
FOLDER = "profile"
NEWEST = 200_000
"""Intervals that each thread of a profile keeps: minutes, or some seconds of a fast environment."""
_LOGGER = logging.getLogger("stagecoach.profile")


class Interval(NamedTuple):
    """One stay in a stage, those within it included; times in nanoseconds of `time.perf_counter_ns`."""

    stage: str
    began: int
    ended: int


class StageTimer:
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
        spent[now] = spent.get(now, 0) + time.perf_counter_ns() - since
        return {stage: value / 1e9 for stage, value in spent.items()}


class Stage:
    """One stage of one clock; may be entered again within itself."""

    def __init__(self, stages: StageTimer, name: str) -> None:
        self._stages, self._name = stages, name
        self._outer: list[tuple[str, int]] = []

    def __enter__(self) -> None:
        stages, now = self._stages, time.perf_counter_ns()
        stages._spent[stages._now] += now - stages._since
        self._outer.append((stages._now, now))
        stages._now, stages._since = self._name, now

    def __exit__(self, *_: object) -> None:
        stages, now = self._stages, time.perf_counter_ns()
        stages._spent[self._name] += now - stages._since
        outer, began = self._outer.pop()
        stages._now, stages._since = outer, now
        if stages._intervals is not None:
            stages._intervals.append(Interval(self._name, began, now))


class Profile:
    """The timelines of one process's threads; where it is not `on`, nothing is kept and nothing written."""

    def __init__(self, store: ObjectStore, name: str, on: bool) -> None:
        self._store, self._name, self._on = store, name, on
        self._threads: dict[str, StageTimer] = {}

    def add(self, thread: str, stages: StageTimer) -> StageTimer:
        """From now on keeps what this thread does; returns `stages`."""
        if self._on:
            stages.record(NEWEST)
        self._threads[thread] = stages
        return stages

    def write(self) -> None:
        """Puts it into the store; a failure is logged, and nothing else depends on it."""
        if not self._on:
            return
        try:
            self._store.put(f"{FOLDER}/{self._name}-{os.getpid()}.json", self._encoded())
        except (StagecoachError, OSError) as error:
            _LOGGER.warning("the profile of %s is lost: %s", self._name, error)

    def _encoded(self) -> bytes:
        """JSON: `traceEvents` (microseconds of the wall clock), and seconds by thread and stage in `otherData`."""
        to_clock = time.time_ns() - time.perf_counter_ns()  # so that several machines' lie side by side
        pid, seconds = os.getpid(), {}
        events: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": pid, "tid": 0,
             "args": {"name": f"{self._name} ({socket.gethostname()})"}}
        ]  # fmt: skip
        for number, (thread, stages) in enumerate(self._threads.items(), 1):
            events.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": number, "args": {"name": thread}})
            events += [
                {
                    "name": item.stage, "ph": "X", "pid": pid, "tid": number,
                    "ts": (item.began + to_clock) / 1000, "dur": (item.ended - item.began) / 1000,
                }
                for item in stages.intervals
            ]  # fmt: skip
            seconds[thread] = {stage: round(spent, 6) for stage, spent in stages.seconds().items()}
        return json.dumps({"traceEvents": events, "otherData": {"name": self._name, "seconds": seconds}}).encode()
