"""The watchdog of a process that steps environments: ends it when they hang, or when it outgrows its memory.

A heartbeat says only that a process is there. This thread looks once a second at what the main thread does and how
often it got on with it; the main thread only counts. Native code that hangs and holds Python's lock stops this thread
too. For that a thread of Python's own, which needs no lock, ends the process where this one has not looked for long,
and leaves all stacks on the standard error (shared/last_words.py reads them).
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollout_worker.trail import Past
from rollout_worker.vector import Place, Step, VectorEnvironment
from shared.config import Config
from shared.failure import Failure, FailureKind
from shared.heartbeat import Heartbeat
from shared.printable import complain
from shared.spaces import Array, Columns

_LOGGER = logging.getLogger("stagecoach.worker")
OUTGROWN = "outgrew its memory limit"
"""How the life of a worker ends that has become too large; its place is to be filled by a new process."""
_LOOK_SECONDS = 1.0
_LOCKED = 0.8
"""Of `rollout.silent_seconds`: before the fleet takes the process for silent, which would not say where it hangs."""
_FAR_BEYOND = 1.5
"""A process this many times over its limit is not allowed to finish its fragment: the machine might not stand it."""
_STANDARD_ERROR = 2
"""The file itself: what stands in `sys.stderr` may need Python's lock."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Doing:
    """What the main thread does, and whose failure it is if that hangs."""

    what: str
    kind: FailureKind


OWN_WORK = Doing("its own work", FailureKind.OTHER)
_START, _RESET, _STEP, _CLOSE = (
    Doing(f"{what} of its environments", FailureKind.ENVIRONMENT) for what in ("the start", "reset", "step", "close")
)


class Watchdog:
    """Watches the thread that starts it. Where all roles share a process nobody starts it: a debugger may hold them."""

    def __init__(self, name: str, config: Config, heartbeat: Heartbeat, last_orders: Callable[[Failure], None]) -> None:
        self._name = name
        self._deadline = config.environment.step_deadline_seconds
        self._locked_seconds = _LOCKED * config.rollout.silent_seconds
        self._limit = config.rollout.memory_limit_bytes
        self._heartbeat = heartbeat
        self._last_orders = last_orders
        self._watched = 0
        self._stop = threading.Event()
        self._seen, self._looks, self._more = -1, 0, 0.0
        self.catch_up_seconds = config.rollout.catch_up_seconds
        self.doing: Doing | None = None
        """What may hang; None where nothing is watched. A named wait is not watched: it has its own deadline."""
        self.steps = 0
        """Counted by the main thread each time that it gets on."""
        self.outgrown: int | None = None
        """Bytes that the process and its children hold, once that is more than they may."""

    def start(self) -> None:
        """Begins to look at the thread that calls this."""
        self._watched = threading.get_ident()
        self._end_if_locked()
        threading.Thread(target=self._run, name=f"watchdog-{self._name}", daemon=True).start()

    def stop(self) -> None:
        """Ends the looking."""
        self._stop.set()

    @contextlib.contextmanager
    def during(self, doing: Doing, more_seconds: float = 0.0) -> Iterator[None]:
        """Names what is done meanwhile, and may take so much longer than a step."""
        before, self.doing = self.doing, doing
        self.steps += 1
        self._more = more_seconds
        try:
            yield
        finally:
            self.doing, self._more = before, 0.0
            self.steps += 1

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_SECONDS):
            self._end_if_locked()
            self._look_at_progress()
            if self._limit is not None:
                self._look_at_memory(self._limit)
        faulthandler.cancel_dump_traceback_later()

    def _end_if_locked(self) -> None:
        """Unless this is called again before."""
        faulthandler.dump_traceback_later(self._locked_seconds, exit=True, file=_STANDARD_ERROR)

    def _look_at_progress(self) -> None:
        doing = self.doing  # the main thread may change it meanwhile
        if doing is None or self._heartbeat.waits or self.steps != self._seen:
            self._seen, self._looks = self.steps, 0
            return
        self._looks += 1  # looks, not seconds: a process that was stopped for a while has not hung
        if self._looks * _LOOK_SECONDS >= self._deadline + self._more:
            stack = self._stack()
            where = stack[-1] if stack else None
            place = f"{where.filename}:{where.lineno}, in {where.name}" if where else "an unknown place"
            _LOGGER.error("%s hangs in %s:\n%s", self._name, doing.what, "".join(traceback.format_list(stack)))
            said = f"it has not got on for {self._deadline:g} s (environment.step_deadline_seconds)"
            self._end(Failure(doing.kind, f"{self._name} hangs in {doing.what}, at {place}; {said}"))

    def _stack(self) -> list[traceback.FrameSummary]:
        frame = sys._current_frames().get(self._watched)
        return list(traceback.extract_stack(frame)) if frame else []

    def _look_at_memory(self, limit: int) -> None:
        held = resident_bytes(os.getpid())
        self.outgrown = held if held > limit else None
        if held > _FAR_BEYOND * limit:
            said = f"{self._name} holds {held} bytes, far beyond rollout.memory_limit_bytes={limit}"
            self._end(Failure(FailureKind.OTHER, said))

    def _end(self, failure: Failure) -> None:
        """Ends this process and its environments' processes, after the last orders, which may fail."""
        _LOGGER.error("%s; its process ends", failure.detail)
        complain(failure.detail)
        try:
            self._last_orders(failure)
        except Exception:
            _LOGGER.exception("%s could not end in order", self._name)
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(1)


class WatchedEnvironment:
    """A vector environment whose every call the watchdog sees."""

    def __init__(self, make: Callable[[], VectorEnvironment], watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        with watchdog.during(_START):
            self._environment = make()
        self.num_envs = self._environment.num_envs

    def reset(self, seeds: Sequence[int], past: Past | None = None) -> dict[str, tuple[Columns, Array]]:
        more = self._watchdog.catch_up_seconds if past else 0.0
        with self._watchdog.during(_RESET, more):
            return self._environment.reset(seeds, past)

    @property
    def place(self) -> Place | None:
        return self._environment.place

    def step(self, actions: Mapping[str, Columns]) -> Step:
        watchdog = self._watchdog
        before, watchdog.doing = watchdog.doing, _STEP
        try:
            return self._environment.step(actions)
        finally:
            watchdog.doing = before
            watchdog.steps += 1

    def close(self) -> None:
        with self._watchdog.during(_CLOSE):
            self._environment.close()


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and all its descendants, in bytes; 0 where /proc does not tell."""
    held = 0
    with contextlib.suppress(OSError, IndexError):
        held += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                held += sum(resident_bytes(int(child)) for child in (thread / "children").read_text().split())
    return held
