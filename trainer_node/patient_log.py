"""The experience log as a trainer reads it: through a wait, by name, for a shard that is away."""

from __future__ import annotations

from collections.abc import Callable

from shared.errors import ShardUnavailable
from shared.experience_log import LogEntry
from shared.heartbeat import Heartbeat, insist
from shared.role import Role


class PatientLog:
    """Reads like the log; nothing, as if there were no more, where the trainer is to end while it waits."""

    def __init__(self, role: Role, heartbeat: Heartbeat, leaving: Callable[[], bool]) -> None:
        self._role, self._heartbeat, self._leaving = role, heartbeat, leaving
        self._log = role.log()

    def read(self, after: str, count: int, block_seconds: float) -> list[LogEntry]:
        """As `ExperienceLog.read`; raises `WaitTimeout` where the shard does not come back."""
        try:
            return self._log.read(after, count, block_seconds)
        except ShardUnavailable:
            pass

        def again() -> list[LogEntry]:
            over = self._leaving() or self._role.flow.read().state != "running"
            return [] if over else self._log.read(after, count, 0.0)

        with self._heartbeat.waiting("a Redis shard", self._role.config.redis.retry_seconds, outage=True) as wait:
            return insist(wait, again, (ShardUnavailable,), longest_pause_seconds=1.0)
