"""Faults for a run of the command line: which process is what, what is done to it, and when the run is well again."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from stagecoach.shared.base.errors import StagecoachError
from stagecoach.shared.protocol.flow_control import Flow
from stagecoach.shared.protocol.heartbeat import read_heartbeats
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.ledger import LedgerLine, read_accounting
from stagecoach.shared.protocol.redis_client import connect_redis, without_retries
from tests.support.processes.command_line import CommandLine

_SERVICES = {
    "Redis": ("redis-server", "valkey-server"),
    "store": ("rclone serve s3",),
    "raylet": ("raylet/raylet",),
    "GCS": ("gcs_server",),
}
"""Kind → what its command line has."""
AWAY = (StagecoachError, redis.RedisError, OSError)
"""Errors of reading a run while part of it is gone."""


class Watched:
    """A run that is looked at from outside, whatever of it is there."""

    def __init__(self, terminal: CommandLine, run_id: str) -> None:
        self._terminal, self.run_id = terminal, run_id
        self._keys = RunKeys(run_id)
        self._connected_to: Any = None
        self._client: redis.Redis | None = None

    def client(self) -> redis.Redis:
        """A connection to the run's present Redis; raises one of `AWAY`."""
        handle = self._terminal.handle(self.run_id)
        address = handle.folder.live_address()
        if address is None:
            raise FileNotFoundError("the run is not live")
        if address != self._connected_to or self._client is None:
            self._client = connect_redis(address, without_retries(handle.config))
            self._connected_to = address
        return self._client

    def version(self) -> int:
        return Flow(self.client(), self.run_id).read().version

    def accounting(self) -> dict[str, LedgerLine]:
        return read_accounting(self.client(), self.run_id)

    def incarnation(self, worker: str) -> int:
        raw: Any = self.client().hget(self._keys.incarnations, worker)
        return int(raw or 0) - 1

    def has_pushed_after(self, worker: str, incarnation: int) -> bool:
        """Checks that a later incarnation of this worker has pushed its first fragment."""
        lives = range(incarnation + 1, self.incarnation(worker) + 1)
        return any(self.client().hexists(self._keys.pushed, f"{worker}:{life}") for life in lives)

    def processes(self) -> dict[str, list[tuple[str, int]]]:
        found: dict[str, list[tuple[str, int]]] = {}
        commands = self._terminal.left()
        for pid, command in commands.items():
            for kind, words in _SERVICES.items():
                if any(word in command for word in words):
                    found.setdefault(kind, []).append((kind, pid))
        with contextlib.suppress(*AWAY):
            for beat in read_heartbeats(self.client(), self.run_id):
                if beat.pid in commands and beat.ended is None:
                    found.setdefault(beat.role, []).append((beat.id, beat.pid))
        return found


@dataclass
class Fault:
    """One that was done, and what must be seen before it counts as survived."""

    kind: str
    how: str
    name: str
    pid: int
    done: float
    """Time of the fault; of a stop, the time at which the process continued."""
    version: int
    incarnation: int
    recovered: float | None = None
    alone: bool = True
    """True if no other fault came before it was over."""

    @property
    def label(self) -> str:
        return f"{self.kind} {self.how}"

    def is_over(self, watched: Watched) -> bool:
        """A later version is published; a killed worker's successor has pushed as well. Raises one of `AWAY`."""
        if self.version < 0:  # it could not be asked at the time: Redis was gone
            self.version = watched.version()
        if self.kind == "worker" and self.how == "killed":
            return watched.has_pushed_after(self.name, self.incarnation)
        return watched.version() > self.version


def kill(watched: Watched, kind: str, name: str, pid: int) -> Fault:
    incarnation = _asked(lambda: watched.incarnation(name)) if kind == "worker" else -1
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return Fault(kind, "killed", name, pid, time.monotonic(), _asked(watched.version), incarnation)


def stop(watched: Watched, kind: str, name: str, pid: int) -> Fault:
    version = _asked(watched.version)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    return Fault(kind, "stopped", name, pid, time.monotonic(), version, -1)


def deny_files(watched: Watched, kind: str, name: str, pid: int) -> Fault:
    """It may open no file and no connection more."""
    version = _asked(watched.version)
    with contextlib.suppress(OSError):
        _limit(pid, resource.RLIMIT_NOFILE, len(os.listdir(f"/proc/{pid}/fd")))
    return Fault(kind, "short of files", name, pid, time.monotonic(), version, -1)


def deny_memory(watched: Watched, kind: str, name: str, pid: int) -> Fault:
    """It gets no memory more."""
    version = _asked(watched.version)
    with contextlib.suppress(OSError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
        _limit(pid, resource.RLIMIT_AS, pages * resource.getpagesize())
    return Fault(kind, "short of memory", name, pid, time.monotonic(), version, -1)


def _limit(pid: int, which: int, most: int | None) -> None:
    hard = resource.prlimit(pid, which)[1]
    resource.prlimit(pid, which, (hard if most is None else most, hard))


def go_on(fault: Fault) -> None:
    """SIGCONT to what was stopped, and no limits, where it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(fault.pid, signal.SIGCONT)
        _limit(fault.pid, resource.RLIMIT_NOFILE, None)
        _limit(fault.pid, resource.RLIMIT_AS, None)
    fault.done = time.monotonic()


def _asked(question: Any) -> int:
    try:
        return int(question())
    except AWAY:
        return -1
