"""A member of the fleet: what is known of one role, from its actor's life and from its heartbeats."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from shared.heartbeat import Beat, growing_pauses
from shared.restarts import Progress, RestartBound

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 60.0
"""Between processes that leave again and again without having done anything."""


@dataclass
class Member:
    """One role of the fleet: its actor and the call that is its life."""

    name: str
    make: Callable[[dict[str, Any]], Any]
    """A new actor with these options, in a process of its own."""
    bound: RestartBound
    progress: Callable[[], Progress]
    """How far the role has come, whatever its process is."""
    actor: Any = None
    life: Any = None
    """None once it has ended for good, or until its place is filled again."""
    pauses: Iterator[float] | None = None
    """Before its place is filled again, while its processes leave without having done anything."""
    due: float | None = None
    """When its place is filled again."""
    started: float = field(default_factory=time.monotonic)
    process: str | None = None
    """By the last heartbeat of its present life."""
    former: set[str] = field(default_factory=set)
    """Processes that it had before. One whose machine was cut off may beat again, in turns with its successor."""
    stamp: str = ""
    """Of its last heartbeat."""
    outages: int = 0
    """Of Redis, as the coordinator has seen them, when this life began."""
    silent_looks: int = 0
    """Looks at Redis since that stamp changed."""

    def begin(self, options: dict[str, Any]) -> None:
        """A new process in the place of the former one, if there was any."""
        self.leave()
        self.actor, self.due = self.make(options), None
        self.life = self.actor.run.remote()
        self.started = time.monotonic()

    def leave(self, due: float | None = None) -> None:
        """Its process goes; `due` is when the next one is to come."""
        if self.actor is not None:
            ray.kill(self.actor, no_restart=True)
        if self.process is not None:
            self.former.add(self.process)
        self.life, self.due, self.process, self.stamp, self.silent_looks = None, due, None, "", 0

    def pause_seconds(self) -> float:
        """After a process that left on purpose: none where it has done something, else longer each time."""
        self.bound.saw(self.progress())
        if self.bound.progressed:
            self.pauses = None
            return 0.0
        self.pauses = self.pauses or growing_pauses(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        return next(self.pauses)


def kill_here(beat: Beat) -> bool:
    """Ends a process of Ray's on this machine: one that is stopped does not hear what Ray tells it."""
    command = Path(f"/proc/{beat.pid}/cmdline")
    if beat.host != socket.gethostname() or not command.exists() or b"ray::" not in command.read_bytes():
        return False
    os.kill(beat.pid, signal.SIGKILL)
    return True


def cause(error: Exception) -> Exception:
    """What a role raised, without Ray's frame around it."""
    return getattr(error, "cause", None) or error
