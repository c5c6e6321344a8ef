"""Profiles: one object for each process in the store, in the Trace Event format that Perfetto and speedscope open.

Each process of a run with `signals.profile` writes its own when it ends; `coordinator/profiles.py` joins them.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from typing import Any

from shared.errors import StagecoachError
from shared.object_store import ObjectStore
from shared.stages import Stages

FOLDER = "profile"
NEWEST = 200_000
"""Intervals that each thread keeps: minutes, or some seconds of a fast environment."""
_LOGGER = logging.getLogger("stagecoach.profile")


class Profile:
    """The timelines of one process's threads."""

    def __init__(self, store: ObjectStore, name: str, on: bool) -> None:
        """Where it is not `on`, nothing is kept and nothing written."""
        self._store, self._name, self._on = store, name, on
        self._threads: dict[str, Stages] = {}

    def add(self, thread: str, stages: Stages) -> Stages:
        """From now on keeps what this thread does; answers `stages`."""
        if self._on:
            stages.record(NEWEST)
        self._threads[thread] = stages
        return stages

    def write(self) -> None:
        """Puts it into the store. One that fails is told in the log, and hinders nothing."""
        if not self._on:
            return
        try:
            self._store.put(f"{FOLDER}/{self._name}-{os.getpid()}.json", self.encode())
        except (StagecoachError, OSError) as error:
            _LOGGER.warning("the profile of %s is lost: %s", self._name, error)

    def encode(self) -> bytes:
        """JSON: `traceEvents` (microseconds of the wall clock), and seconds by thread and stage in `otherData`."""
        to_clock = time.time_ns() - time.perf_counter_ns()  # so that several machines' lie side by side
        pid = os.getpid()
        events = [_label("process_name", pid, 0, f"{self._name} ({socket.gethostname()})")]
        for number, (thread, stages) in enumerate(self._threads.items(), 1):
            events.append(_label("thread_name", pid, number, thread))
            events += [
                {
                    "name": item.stage, "ph": "X", "pid": pid, "tid": number,
                    "ts": (item.began + to_clock) / 1000, "dur": (item.ended - item.began) / 1000,
                }
                for item in stages.intervals
            ]  # fmt: skip
        seconds = {
            thread: {stage: round(spent, 6) for stage, spent in stages.seconds().items()}
            for thread, stages in self._threads.items()
        }
        return json.dumps({"traceEvents": events, "otherData": {"name": self._name, "seconds": seconds}}).encode()


def _label(kind: str, pid: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": thread, "args": {"name": name}}
