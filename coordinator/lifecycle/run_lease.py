"""Lease of a run in Redis: one coordinator supervises it, across machines, folders and containers.

A coordinator takes the lease before it changes the run, and renews it every second; a second one is rejected. A
coordinator that was cut off for so long that another has taken the lease ends.
"""

import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

import redis

from stagecoach.coordinator.services.embedded import process_stat
from stagecoach.coordinator.services.restarter import connect_once
from stagecoach.shared.base import world
from stagecoach.shared.base.errors import RunLive, StagecoachError
from stagecoach.shared.protocol.heartbeat import BEAT_SECONDS, DEAD_AFTER_SECONDS
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.scripts import Script
from stagecoach.shared.runtime.run_context import RunContext

_LOGGER = logging.getLogger("stagecoach.coordinator")
_POLL_SECONDS = 0.3


class RunLease:
    """One coordinator's lease on a run; `on_lost` is called if another coordinator has taken it."""

    def __init__(self, context: RunContext, on_lost: Callable[[], None] = lambda: None) -> None:
        self._context, self._keys, self._on_lost = context, RunKeys(context.run_id), on_lost
        stat = process_stat(os.getpid())
        start = stat.started if stat is not None else "?"
        self.name = f"{socket.gethostname()} {os.getpid()} {_machine()} {start} {world.token_hex(8)}"
        """Unique name of this coordinator."""
        self.lost: str | None = None
        """Description of the coordinator that has taken the run over."""
        self._seen = "", ""
        """Another holder of the lease, and when it was seen last."""
        self._stop = world.Event()
        self._thread = world.Thread(target=self._run, name="run-lease", daemon=True)

    def take(self) -> None:
        """Takes the run if Redis has it; raises `RunLive` while another coordinator supervises it.

        Waits for the lease of a dead coordinator to expire, unless its process was on this machine and is gone. A live
        process of this machine keeps the lease even if silent: the run's folder may be a copy.
        """
        holder = self._visible_holder() or self._hold(self._context.redis, self.name)
        since, seen = world.monotonic(), self._read("coordinator_seen")
        while holder:
            alive = _alive(holder)
            if alive is False:
                holder = self._hold(self._context.redis, self.name, ended=holder)
                continue
            silent = self._read("coordinator_seen") == seen
            if alive or not silent or world.monotonic() - since > 2 * DEAD_AFTER_SECONDS:
                raise RunLive(
                    f"run {self._context.run_id!r} is live already: its coordinator is {_in_words(holder)}; "
                    f"`stagecoach watch` shows it, `stagecoach stop` ends it"
                )
            world.sleep(_POLL_SECONDS)
            holder = self._hold(self._context.redis, self.name)

    def keep(self) -> None:
        self._thread.start()

    def release(self) -> None:
        """Releases the lease, so that another coordinator need not wait."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        try:
            with connect_once(self._context, "coordinator") as client:
                self._hold(client, "", ended=self.name)
        except (StagecoachError, redis.RedisError) as error:
            _LOGGER.warning("Redis rejects the end of the run's lease: %s", error)

    def _run(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            try:
                holder = self._hold(self._context.redis, self.name)
                lost = self._is_there(holder)
            except (StagecoachError, redis.RedisError):
                continue  # retried; the roles' own calls report the error
            if lost:
                self.lost = f"another coordinator ({_in_words(holder)}) has taken the run over"
                _LOGGER.error("%s while this one was cut off, which ends", self.lost)
                self._on_lost()
                return

    def _is_there(self, holder: str) -> bool:
        """Returns whether another holder of the lease, if there is one, is seen again. One that Redis merely names,
        since it was rolled back, is not, and loses the lease after a while."""
        before, self._seen = self._seen, (holder, self._read("coordinator_seen") if holder else "")
        return bool(holder) and before[0] == holder and before[1] != self._seen[1]

    def _hold(self, client: redis.Redis, coordinator: str, ended: str = "") -> str:
        """Takes, renews or releases the lease; returns another holder, or an empty string."""
        script = Script(client, self._keys, "hold_run")
        found = script(coordinator=coordinator, ended=ended, silence_seconds=DEAD_AFTER_SECONDS)
        return bytes(found).decode(errors="replace")

    def _visible_holder(self) -> str:
        """Recorded holder, if it is another process that is visibly alive."""
        holder = self._read("coordinator")
        own = holder.split()[1:2] == [str(os.getpid())]
        return holder if not own and _alive(holder) else ""

    def _read(self, field: str) -> str:
        found = self._context.redis.hget(self._keys.flow, field)
        return found.decode(errors="replace") if isinstance(found, bytes) else ""


def _in_words(holder: str) -> str:
    host, pid = (*holder.split(), "?", "?")[:2]
    return f"process {pid} on {host}"


def _alive(holder: str) -> bool | None:
    """Returns whether this holder's process is alive; None if it is not visible from here."""
    parts = holder.split()
    if len(parts) != 5 or parts[2] != _machine() or parts[2] == "?" or not parts[1].isdigit():
        return None
    stat = process_stat(parts[1])
    return stat is not None and stat.started == parts[3]


def _machine() -> str:
    """Identifies this boot of this machine and the process namespace (container)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return "?"
