"""Who tends a run: one coordinator, by what Redis says, whatever machine, folder or container it is in.

A coordinator takes the run before it changes anything of it, and says every second that it is there. A second one is
refused while the first does. One that was cut off for so long that another has taken the run lets go of it.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import redis

from coordinator.preparation import connect_once
from coordinator.services import process_stat
from shared.errors import RunLive, StagecoachError
from shared.heartbeat import BEAT_SECONDS, DEAD_AFTER_SECONDS
from shared.redis_keys import RunKeys
from shared.role import Role
from shared.script_calls import Step

_LOGGER = logging.getLogger("stagecoach.coordinator")
_LOOK_SECONDS = 0.3
_TEND = """
-- KEYS flow. ARGV: a coordinator ('' lets go), one that has ended ('' for none), seconds of silence after which one is
-- taken for gone. Answers '' where the first is the run's coordinator now (or there is no run), else who is.
redis.call('HDEL', KEYS[1], '')
if redis.call('EXISTS', KEYS[1]) == 0 then return '' end
local held, seen = unpack(redis.call('HMGET', KEYS[1], 'coordinator', 'coordinator_seen'))
local now = redis.call('TIME')[1]
if held and held ~= '' and held ~= ARGV[1] and held ~= ARGV[2]
   and math.abs(tonumber(now) - (tonumber(seen) or 0)) < tonumber(ARGV[3]) then return held end
redis.call('HSET', KEYS[1], 'coordinator', ARGV[1], 'coordinator_seen', now)
return ''
"""


class Tenure:
    """The hold of one coordinator on a run, from `take` to `release`."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._flow = RunKeys(role.run_id).flow
        start = _started(os.getpid()) or "?"
        self.name = f"{socket.gethostname()} {os.getpid()} {_machine()} {start} {secrets.token_hex(8)}"
        """This coordinator, of all that there ever were."""
        self.lost: str | None = None
        """Who has taken the run over, where somebody has."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self) -> None:
        """Takes the run where Redis has it; raises `RunLive` while another coordinator tends it.

        One that has just died is waited for, unless it is of this machine and cannot be there any more. One of another
        process of this machine that is there keeps it, even if it has been silent: the run's folder may be a copy.
        """
        holder = self._visible() or self._ask(self._role.redis)
        since, seen = time.monotonic(), self._seen()
        while holder:
            at_work = _alive(holder)
            if at_work is False:
                holder = self._ask(self._role.redis, ended=holder)
                continue
            if at_work or self._seen() != seen or time.monotonic() - since > 2 * DEAD_AFTER_SECONDS:
                host, pid = (*holder.split(), "?", "?")[:2]
                raise RunLive(
                    f"run {self._role.run_id!r} is live already: its coordinator is process {pid} on {host}; "
                    f"`stagecoach watch` shows it, `stagecoach stop` ends it"
                )
            time.sleep(_LOOK_SECONDS)
            holder = self._ask(self._role.redis)

    def keep(self, lost: Callable[[], None]) -> None:
        """Says from now on that it is there; calls `lost` once where another has taken the run over."""
        self._thread = threading.Thread(target=self._run, args=(lost,), name="tenure", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Lets go, so that another need not wait."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        try:
            with connect_once(self._role, "coordinator") as client:
                Step(client, _TEND)([self._flow], ["", self.name, DEAD_AFTER_SECONDS])
        except (StagecoachError, redis.RedisError) as error:
            _LOGGER.warning("that the run has no coordinator any more could not be told: %s", error)

    def _run(self, lost: Callable[[], None]) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            try:
                holder = self._ask(self._role.redis)
            except (StagecoachError, redis.RedisError):
                continue  # the next try tells; the roles' own calls report what is wrong
            if holder:
                host, pid = (*holder.split(), "?", "?")[:2]
                self.lost = f"another coordinator (process {pid} on {host}) has taken the run over"
                _LOGGER.error("%s while this one was cut off; it lets go", self.lost)
                lost()
                return

    def _ask(self, client: redis.Redis, ended: str = "") -> str:
        """Takes or renews; the holder where that is another, else nothing."""
        found = Step(client, _TEND)([self._flow], [self.name, ended, DEAD_AFTER_SECONDS])
        return bytes(found).decode(errors="replace")

    def _visible(self) -> str:
        """Who tends the run by what is written there, where that is another process that can be seen at work."""
        found = self._role.redis.hget(self._flow, "coordinator")
        holder = found.decode(errors="replace") if isinstance(found, bytes) else ""
        own = holder.split()[1:2] == [str(os.getpid())]
        return holder if not own and _alive(holder) else ""

    def _seen(self) -> object:
        return self._role.redis.hget(self._flow, "coordinator_seen")


def _alive(holder: str) -> bool | None:
    """Whether the process of this name is at work; None where that cannot be seen from here."""
    parts = holder.split()
    if len(parts) != 5 or parts[2] != _machine() or parts[2] == "?" or not parts[1].isdigit():
        return None
    return _started(int(parts[1])) == parts[3]


def _machine() -> str:
    """This start of this machine, as far as its processes see each other: not beyond their container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return "?"


def _started(pid: int) -> str | None:
    """When a process began; None where it has ended or cannot be seen."""
    found = process_stat(pid)
    return None if found is None else found.started
