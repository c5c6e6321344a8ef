"""One role of the fleet: its Ray actor, heartbeats and restarts."""

import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import ray

from stagecoach.coordinator.services.ray_internals import process_of
from stagecoach.shared.base import world
from stagecoach.shared.base.process import ExitDiagnostics
from stagecoach.shared.protocol.heartbeat import Beat, growing_pauses
from stagecoach.shared.runtime.restarts import Progress, RestartBound

POLL_SECONDS = 0.2
"""Time between two polls of the fleet."""
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 60.0
"""Between processes that leave again and again without having done anything."""
_ADDRESS = re.compile(r"\bip: ([0-9a-fA-F.:]+)")
_NODE = re.compile(r"node (has died|died|was terminated|is (dead|preempted))", re.IGNORECASE)


class ManagedActor:
    """A role's present actor, and the processes that it had before."""

    def __init__(
        self, name: str, make: Callable[[], Any], bound: RestartBound, progress: Callable[[], Progress], outages: int,
        former: set[str],
    ) -> None:  # fmt: skip
        """Starts its first process.

        Args:
            make: makes a new actor in a process of its own, wherever there is capacity by then.
            progress: how far the role has come, whatever its process is.
            outages: those of Redis, as the coordinator has counted them, when its present process began.
            former: processes that it had before. One whose machine was cut off may beat again, in turns with its
                successor.
        """
        self.name, self.role = name, name.partition("-")[0]
        self._make, self.bound, self.progress, self.outages, self.former = make, bound, progress, outages, former
        bound.record_progress(progress())
        self.actor = make()
        self.call: Any = self.actor.run.remote()
        """The call of its `run`; None once the role has ended for good, or until it is started again."""
        self.started = world.monotonic()
        self.restart_at: float | None = None
        self._pauses: Iterator[float] | None = None
        """Pauses before restarts, while its processes leave without progress."""
        self._process: str | None = None
        """Current process, by its last heartbeat."""
        self.stamp = ""
        self._silent_polls = 0
        """Since that stamp changed: whatever keeps the coordinator from polling keeps the others from beating."""

    def restart(self) -> None:
        self.leave()
        self.actor = self._make()
        self.run_again()

    def run_again(self) -> None:
        """Starts its next process, from the same actor."""
        self._forget_process()
        self.call, self.started = self.actor.run.remote(), world.monotonic()

    def leave(self, restart_at: float | None = None) -> None:
        """Ends its process; `restart_at` is when the next one is started."""
        ray.kill(self.actor, no_restart=True)
        self._forget_process()
        self.call, self.restart_at = None, restart_at

    def _forget_process(self) -> None:
        if self._process is not None:
            self.former.add(self._process)
        self._process, self.stamp, self._silent_polls = None, "", 0

    def pause_seconds(self) -> float:
        """The pause after a process that left on purpose: none after progress, else longer each time."""
        self.bound.record_progress(self.progress())
        if self.bound.progressed:
            self._pauses = None
            return 0.0
        self._pauses = self._pauses or growing_pauses(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        return next(self._pauses)

    def last_beat(self, beats: Iterable[Beat]) -> Beat | None:
        return next((beat for beat in beats if beat.id == self.name and beat.process not in self.former), None)

    def silent_seconds(self, beat: Beat | None, unplaced: bool) -> float:
        """Takes in its newest heartbeat, once a poll; returns for how long its process has been silent.

        A process that has not beaten yet is still starting, which may take long; so is one without a place.
        """
        if beat is None or self.call is None:
            return 0.0
        if beat.process not in self.former:
            if beat.ended or (beat.process, beat.stamp) != (self._process, self.stamp):
                self._silent_polls = 0
            self._process, self.stamp = beat.process, beat.stamp
        if self._process is None or (beat.ended and beat.process not in self.former):
            return 0.0
        self._silent_polls = 1 if unplaced else self._silent_polls + 1
        return self._silent_polls * POLL_SECONDS


def kill_here(actor: Any) -> None:
    """Ends an actor's process if it is on this machine: a process that is stopped (SIGSTOP) ignores Ray.

    Ray says which process that is. A heartbeat also does, but whoever can write to Redis could name any other there.
    """
    context: Any = ray.get_runtime_context()
    node, pid = process_of(actor) or ("", 0)
    command = Path(f"/proc/{pid}/cmdline")  # Ray may run in another container, with ids of its own
    if node == context.get_node_id() and command.exists() and command.read_bytes().startswith(b"ray::"):
        os.kill(pid, signal.SIGKILL)


def how_it_ended(pid: int, words: ExitDiagnostics) -> str:
    """Describes how the process of a role ended."""
    who = f"its process (pid {pid})"
    if words.how is None:
        return f"{who} was killed without a message (by a person, or by the kernel because memory ran out?)"
    return f"{who} ended with {words.how}" if words.how.startswith("exit") else f"{who} was ended by {words.how}"


def how_it_died(error: ray.exceptions.RayError) -> tuple[str, ExitDiagnostics]:
    """Describes how an actor ended, and with it the process of its role. Ray's error alone knows where it was."""
    said, nothing = str(error), ExitDiagnostics(None, ())
    address = _ADDRESS.search(said)
    who = f"its actor on {address[1] if address else 'an unknown machine'}"
    if _NODE.search(said):
        return f"{who} went with its machine", nothing
    return f"{who} was killed (by a person, or by the kernel because memory ran out?)", nothing
