"""What the parts of a run cost: processor time of each role from /proc, and Redis by its own count."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import redis

_TICKS = os.sysconf("SC_CLK_TCK")


def processor_seconds(pid: int) -> float | None:
    """User and system time of a process so far; None where it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def resident_peak(pid: int) -> int:
    """The most bytes that a process ever held, so far; 0 where it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def below(pid: int) -> list[int]:
    """All processes that this one and its children have started and that are there."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            parents.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
    found, look = [], [pid]
    while look:
        children = parents.get(look.pop(), [])
        found += children
        look += children
    return found


def parent(pid: int) -> int | None:
    """Process id of a process's parent; None if the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def launched_at(pid: int) -> float | None:
    """Start of a process in seconds since the epoch, with the precision of a clock tick; None if it has ended."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / _TICKS


def command_line(pid: int) -> str:
    """Command line of a process, separated by spaces; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
    except OSError:
        return ""


@dataclass
class ProcessorTime:
    """Adds up the processor time of roles, whose processes may come and go."""

    seconds: dict[str, float] = field(default_factory=dict)
    _seen: dict[int, float] = field(default_factory=dict)

    def look(self, roles: Mapping[str, Iterable[int]]) -> None:
        """Role → its processes now. What a process used before it was seen first does not count."""
        for role, pids in roles.items():
            for pid in pids:
                used = processor_seconds(pid)
                if used is not None:
                    self.seconds[role] = self.seconds.get(role, 0.0) + used - self._seen.get(pid, used)
                    self._seen[pid] = used


@dataclass(frozen=True)
class RedisLook:
    """What a Redis has counted so far, and holds now."""

    commands: dict[str, int]
    """Command → calls."""
    microseconds: dict[str, float]
    """Command → what they took within the server."""
    bytes_in: int
    bytes_out: int
    memory_bytes: int
    connections: int

    @classmethod
    def at(cls, client: redis.Redis) -> RedisLook:
        """Now."""
        calls, stats, memory, clients = (
            dict(client.info(part)) for part in ("commandstats", "stats", "memory", "clients")
        )
        commands = {name.removeprefix("cmdstat_"): value for name, value in calls.items()}
        return cls(
            {name: int(value["calls"]) for name, value in commands.items()},
            {name: float(value["usec"]) for name, value in commands.items()},
            int(stats["total_net_input_bytes"]),
            int(stats["total_net_output_bytes"]),
            int(memory["used_memory"]),
            int(clients["connected_clients"]),
        )

    def since(self, before: RedisLook) -> RedisLook:
        """What was counted between two looks."""
        return RedisLook(
            {name: calls - before.commands.get(name, 0) for name, calls in self.commands.items()},
            {name: used - before.microseconds.get(name, 0.0) for name, used in self.microseconds.items()},
            self.bytes_in - before.bytes_in,
            self.bytes_out - before.bytes_out,
            self.memory_bytes,
            self.connections,
        )
