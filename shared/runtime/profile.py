"""Timelines of a process's threads: with `metrics.profile` the newest intervals of their stages go to the store.

The format is Trace Event, which Perfetto and speedscope open.
"""

import json
import logging
import os
import socket
import time
from typing import Any

from stagecoach.shared.base import world
from stagecoach.shared.base.errors import StagecoachError
from stagecoach.shared.base.stage_timer import StageTimer
from stagecoach.shared.storage.object_store import ObjectStore

FOLDER = "profile"
NEWEST = 200_000
"""Intervals kept of each thread: minutes, or some seconds of a fast environment."""
_LOGGER = logging.getLogger("stagecoach.profile")


class Profile:
    """The timelines of one process's threads; does nothing unless it is `on`."""

    def __init__(self, store: ObjectStore, name: str, on: bool) -> None:
        self._store, self._name, self._on = store, name, on
        self._threads: dict[str, StageTimer] = {}

    def add(self, thread: str, stages: StageTimer) -> StageTimer:
        """Records the stages of a thread; returns `stages`."""
        if self._on:
            stages.record(NEWEST)
        self._threads[thread] = stages
        return stages

    def write(self) -> None:
        """Writes the profile to the store; logs a failure."""
        if not self._on:
            return
        try:
            self._store.put(f"{FOLDER}/{self._name}-{os.getpid()}.json", self._encoded())
        except (StagecoachError, OSError) as error:
            _LOGGER.warning("the profile of %s is lost: %s", self._name, error)

    def _encoded(self) -> bytes:
        """Returns JSON: `traceEvents` (microseconds of the wall clock), and seconds by stage in `otherData`."""
        to_clock = time.time_ns() - world.nanoseconds()  # so that the timelines of several machines align
        pid, seconds = os.getpid(), {}
        process = {"name": f"{self._name} ({socket.gethostname()})"}
        events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": process}]
        for number, (thread, stages) in enumerate(self._threads.items(), 1):
            events.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": number, "args": {"name": thread}})
            for item in stages.intervals:
                times = {"ts": (item.began + to_clock) / 1000, "dur": (item.ended - item.began) / 1000}
                events.append({"name": item.stage, "ph": "X", "pid": pid, "tid": number, **times})
            seconds[thread] = {stage: round(spent, 6) for stage, spent in stages.seconds().items()}
        return json.dumps({"traceEvents": events, "otherData": {"name": self._name, "seconds": seconds}}).encode()
