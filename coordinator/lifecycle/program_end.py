"""The end of a program whose runs are still live: they end in order, and one line for each says so."""

import contextlib
import sys
import threading
from typing import Any, Protocol

import redis

from stagecoach.shared.base import world
from stagecoach.shared.base.errors import StagecoachError


class LiveRun(Protocol):
    """A run that this process supervises."""

    outcome: Any

    @property
    def run_id(self) -> str: ...
    @property
    def abandoned(self) -> bool: ...
    @property
    def continued_by(self) -> str: ...
    @property
    def grace_seconds(self) -> float: ...
    def stop(self) -> None: ...
    def abandon(self) -> None: ...


_ENDS_WITHIN_SECONDS = 30.0
"""Time for services to end; the last checkpoint has `trainer.grace_seconds` before."""
_LOCK = world.Lock()
_live: list[LiveRun] = []
_watch: world.Thread | None = None


def end_with_program(run: LiveRun) -> None:
    """Ends the run in order once the main thread has ended, if it is still live then."""
    global _watch
    with _LOCK:
        _live[:] = [other for other in _live if other.outcome is None]
        _live.append(run)
        if _watch is None:
            # not a daemon: Python waits for it before it ends the threads and processes that a run needs
            _watch = world.Thread(target=_end_all, name="program-end")
            _watch.start()


def _end_all() -> None:
    threading.main_thread().join()
    live = [run for run in _live if run.outcome is None and not run.abandoned]
    for run in live:
        print(
            f"stagecoach: the program ended while run {run.run_id} was live; it ends with a last checkpoint "
            f"(run.wait() waits for a run). To continue it: {run.continued_by}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        with contextlib.suppress(StagecoachError, redis.RedisError):  # it is abandoned below
            run.stop()
    for run in live:
        deadline = world.monotonic() + run.grace_seconds + _ENDS_WITHIN_SECONDS
        while run.outcome is None and world.monotonic() < deadline:
            world.sleep(0.05)
        run.abandon()
        while run.outcome is None and world.monotonic() < deadline + _ENDS_WITHIN_SECONDS:
            world.sleep(0.05)
