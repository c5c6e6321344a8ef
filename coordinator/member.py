"""A member of the fleet: what is known of one role, from its actor's life and from its heartbeats."""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.errors import EnvironmentFailure, Fenced, StagecoachError
from shared.heartbeat import Beat
from shared.rate import Rate

_ENVIRONMENT = "environment: "
"""How the error of an environment begins, in a reason."""


@dataclass
class Member:
    """One role of the fleet: its actor and the call that is its life."""

    name: str
    actor: Any
    life: Any
    """None once it has ended for good, or until its place is filled again."""
    failures: Rate
    departures: Rate
    """Of processes that left on purpose."""
    due: float | None = None
    """When its place is filled again."""
    started: float = field(default_factory=time.monotonic)
    process: str | None = None
    """By its last heartbeat; another one means that the former died."""
    former: set[str] = field(default_factory=set)
    """Processes that it had before. One whose machine was cut off may beat again, in turns with its successor."""
    stamp: str = ""
    """Of its last heartbeat."""
    last_words: str = ""
    """Why its last process has ended, where that could say so."""
    fruit: bool = False
    """Whether its present life has brought forth anything."""
    fruitless: int = 0
    """Lives in a row that failed before they had done anything."""
    silent_looks: int = 0
    """Looks at Redis since that stamp changed."""

    def change_process(self, process: str | None) -> None:
        """It has another process now, or none yet."""
        if self.process is not None and self.process != process:
            self.former.add(self.process)
        self.process = process


def fruitful(beat: Beat) -> bool:
    """Whether its role has brought forth anything."""
    return bool(beat.progress.get("fragments") or beat.progress.get("evaluations"))


def kill_here(beat: Beat) -> bool:
    """Ends a process of Ray's on this machine: one that is stopped does not hear what Ray tells it."""
    command = Path(f"/proc/{beat.pid}/cmdline")
    if beat.host != socket.gethostname() or not command.exists() or b"ray::" not in command.read_bytes():
        return False
    os.kill(beat.pid, signal.SIGKILL)
    return True


def cause(error: Exception) -> str:
    """What a role raised, without Ray's frame around it."""
    raised = getattr(error, "cause", None)
    if isinstance(raised, Fenced):
        return f"{Fenced.__name__}: {raised}"
    if isinstance(raised, EnvironmentFailure):
        return f"{_ENVIRONMENT}{raised}"
    return str(raised) if isinstance(raised, StagecoachError) else str(error)
