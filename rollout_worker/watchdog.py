"""Watchdog of a process that steps environments: ends it when they hang, or when it exceeds its memory limit.

A heartbeat shows only that a process exists. This thread polls once a second what the main thread does and whether it
progresses; the main thread only counts. Native code that hangs and holds Python's lock stops this thread too: then
faulthandler's thread, which needs no lock, ends the process after a longer time and writes all stacks to standard error
(shared/runtime/process.py reads them).
"""

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from stagecoach.rollout_worker.environments.vector_env import (
    Position,
    RunningEpisodes,
    Step,
    VectorEnvironment,
)
from stagecoach.shared.base import world
from stagecoach.shared.base.failure import Failure, FailureKind
from stagecoach.shared.base.printable import complain
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.experience.spaces import Array, Columns
from stagecoach.shared.protocol.heartbeat import Heartbeat

_LOGGER = logging.getLogger("stagecoach.worker")
_POLL_SECONDS = 1.0
_LOCKED = 0.8
"""Share of `rollout.silent_seconds`: earlier than the fleet, which could not say where the process hangs."""
_FAR_BEYOND = 1.5
"""Multiple of the memory limit at which a process may not even finish its fragment, to protect the machine."""
_STANDARD_ERROR = 2
"""The file itself: `sys.stderr` may need Python's lock."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


OWN_WORK = "its own work"
"""Activity while no environment is called."""


class Watchdog:
    """Watches the thread that starts it; not started in the one-process mode, where a debugger may hold the process."""

    def __init__(
        self, name: str, config: Config, heartbeat: Heartbeat, before_exit: Callable[[Failure], None],
        emit: Callable[[str], None],
    ) -> None:  # fmt: skip
        """Calls `before_exit` before it ends the process; `emit` writes an event."""
        self._name, self._heartbeat, self._before_exit, self._emit = name, heartbeat, before_exit, emit
        self._deadline = config.environment.step_deadline_seconds
        self._locked_seconds = _LOCKED * config.rollout.silent_seconds
        self._limit = config.rollout.memory_limit_bytes
        self._watched = 0
        self._stop = world.Event()
        self._seen, self._polls, self._more = -1, 0, 0.0
        self.catch_up_seconds = config.rollout.catch_up_seconds
        self.doing: str | None = None
        """Activity that may hang; None if unwatched. A named wait is not watched: it has its own deadline."""
        self.steps = 0
        """Count of the main thread's progress."""
        self.outgrown: int | None = None
        """Bytes that the process and its children hold, if above the limit."""

    def start(self) -> None:
        self._watched = world.get_ident()
        self._end_if_locked()
        world.Thread(target=self._run, name=f"watchdog-{self._name}", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    @contextlib.contextmanager
    def during(self, doing: str, more_seconds: float = 0.0) -> Iterator[None]:
        """Names the activity in the context, which may take `more_seconds` longer than a step."""
        before, self.doing = self.doing, doing
        self.steps += 1
        self._more = more_seconds
        try:
            yield
        finally:
            self.doing, self._more = before, 0.0
            self.steps += 1

    def _run(self) -> None:
        while not self._stop.wait(_POLL_SECONDS):
            self._end_if_locked()
            self.check_progress()
            if self._limit is not None:
                held = resident_bytes(os.getpid())
                self.outgrown = held if held > self._limit else None
                if held > _FAR_BEYOND * self._limit:
                    said = f"{self._name} holds {held} bytes, far beyond rollout.memory_limit_bytes={self._limit}"
                    self._end(Failure(FailureKind.OTHER, said))
        faulthandler.cancel_dump_traceback_later()

    def _end_if_locked(self) -> None:
        """Restarts faulthandler's timer, which ends the process if this is not called again in time."""
        faulthandler.dump_traceback_later(self._locked_seconds, exit=True, file=_STANDARD_ERROR)

    def check_progress(self) -> None:
        """Ends the process if the watched thread has not progressed for too many polls."""
        doing = self.doing  # the main thread may change it
        if doing is None or self._heartbeat.waits or self.steps != self._seen:
            self._seen, self._polls = self.steps, 0
            return
        self._polls += 1  # polls, not seconds: a process that was stopped for a while has not hung
        if self._polls * _POLL_SECONDS >= self._deadline + self._more:
            kind = FailureKind.OTHER if doing == OWN_WORK else FailureKind.ENVIRONMENT
            self._end(Failure(kind, self._describe_hang(doing, self._watched)))

    def _describe_hang(self, doing: str, thread: int) -> str:
        frame = sys._current_frames().get(thread)
        stack = traceback.extract_stack(frame) if frame else []
        place = f"{stack[-1].filename}:{stack[-1].lineno}, in {stack[-1].name}" if stack else "an unknown place"
        _LOGGER.error("%s hangs in %s:\n%s", self._name, doing, "".join(traceback.format_list(stack)))
        said = f"no progress for {self._deadline:g} s (environment.step_deadline_seconds)"
        return f"{self._name} hangs in {doing}, at {place}; {said}"

    def close(self, close: Callable[[], None], processes: Collection[BaseProcess]) -> None:
        """Closes environments. In the one-process mode a `close` that hangs is left to its thread, and the
        environments' `processes` are killed."""
        doing = "close of its environments"
        if self._watched and not self._stop.is_set():
            with self.during(doing):
                close()
            return
        thread = world.Thread(target=close, name=f"close-{self._name}", daemon=True)
        thread.start()
        thread.join(_POLL_SECONDS)
        if thread.is_alive():
            with self._heartbeat.waiting("close of its environments", self._deadline):
                thread.join(self._deadline)
        if not thread.is_alive():
            return
        said = f"{self._describe_hang(doing, thread.ident or 0)}; the environments are given up"
        for process in processes:
            process.kill()
        complain(said)
        self._emit(said)

    def _end(self, failure: Failure) -> None:
        """Ends this process and its environments' processes, after `before_exit`, which may fail."""
        _LOGGER.error("%s; its process ends", failure.detail)
        complain(failure.detail)
        try:
            self._before_exit(failure)
        except Exception:
            _LOGGER.exception("%s could not end in order", self._name)
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(1)


class WatchedEnvironment:
    """Vector environment whose calls are watched."""

    def __init__(self, make: Callable[[], VectorEnvironment], watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        others = set(multiprocessing.active_children())
        with watchdog.during("the start of its environments"):
            self._environment = make()
        self._processes = set(multiprocessing.active_children()) - others
        self.num_envs = self._environment.num_envs

    def _call(self, name: str, *arguments: Any, more_seconds: float = 0.0) -> Any:
        with self._watchdog.during(f"{name} of its environments", more_seconds):
            return getattr(self._environment, name)(*arguments)

    def reset(self, seeds: Sequence[int], past: RunningEpisodes | None = None) -> dict[str, tuple[Columns, Array]]:
        more = self._watchdog.catch_up_seconds if past else 0.0
        began: dict[str, tuple[Columns, Array]] = self._call("reset", seeds, past, more_seconds=more)
        return began

    @property
    def position(self) -> Position | None:
        return self._environment.position

    def step(self, actions: Mapping[str, Columns]) -> Step:
        watchdog = self._watchdog  # not `_call`: faster, for the many steps
        before, watchdog.doing = watchdog.doing, "step of its environments"
        try:
            return self._environment.step(actions)
        finally:
            watchdog.doing = before
            watchdog.steps += 1

    def set_phase(self, phase: Phase) -> None:
        self._call("set_phase", phase)

    def set_paused(self, paused: bool) -> bool:
        return bool(self._call("set_paused", paused))

    def hold(self, held: bool) -> None:
        self._call("hold", held)

    def close(self) -> None:
        self._watchdog.close(self._environment.close, self._processes)


def resident_bytes(pid: int) -> int:
    """Returns the resident memory of a process and all its descendants, in bytes; 0 without /proc."""
    held = 0
    with contextlib.suppress(OSError, IndexError):
        held += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                held += sum(resident_bytes(int(child)) for child in (thread / "children").read_text().split())
    return held
