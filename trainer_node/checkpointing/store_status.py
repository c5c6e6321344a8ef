"""Status of the store for `stagecoach status`, and the pauses between tries while the store is away."""

import json
import logging
from collections.abc import Callable
from typing import Any

from stagecoach.shared.base import world
from stagecoach.shared.base.errors import ShardUnavailable, StoreError, StoreUnavailable
from stagecoach.shared.base.printable import counted
from stagecoach.shared.protocol.heartbeat import growing_pauses
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.scripts import write_small
from stagecoach.shared.runtime.run_context import RunContext

_LOGGER = logging.getLogger("stagecoach.writer")


class StoreStatus:
    """The key `store_status`: newest durable and best checkpoint, the current write, and failures of the store."""

    def __init__(self, role: RunContext, pause: Callable[[float], None]) -> None:
        """`pause` waits for so many seconds; it may return earlier."""
        self._role, self._pause = role, pause
        self.durable: str | None = None
        self.best: str | None = None
        self.undeleted: dict[str, Any] = {}
        """Deletions that the store refuses; empty while it deletes."""
        self._outage: dict[str, Any] = {}
        """Failure of the store or a Redis shard; empty while they work."""
        self._pauses = growing_pauses()

    @property
    def error(self) -> str:
        return str(self._outage.get("error", "It has not responded yet"))

    def attempt(self, write: Callable[[], object]) -> bool:
        """Tries once (several times by boto3). On failure reports it, pauses, and returns False."""
        try:
            write()
        except (StoreError, StoreUnavailable, ShardUnavailable) as error:
            self._failed(error)
            return False
        if outage := self._outage:
            self._outage, self._pauses = {}, growing_pauses()
            seconds, often = max(0.0, world.unix_time() - outage["since"]), counted(outage["attempts"], "time")
            self._role.emit_event("store", f"{outage['waiting_for']} is back: it failed {often} in {seconds:.0f} s")
        self.show()
        return True

    def _failed(self, error: Exception) -> None:
        party = "a Redis shard" if isinstance(error, ShardUnavailable) else "the store"
        since, attempts = self._outage.get("since", round(world.unix_time(), 3)), self._outage.get("attempts", 0) + 1
        self._outage = {"waiting_for": party, "since": since, "attempts": attempts, "error": str(error)}
        _LOGGER.warning("%s fails (try %d): %s", party, attempts, error)
        self.show()
        if attempts == 1:
            self._role.emit_event("store", f"{party} fails, training continues: {error}")
        self._pause(next(self._pauses))

    def show_writing(self, name: str) -> None:
        self.show() if self._outage else self.show(writing=name, since=round(world.unix_time(), 3))

    def show_undeleted(self, checkpoints: int, objects: int, problem: str) -> None:
        """Reports once that the store does not delete; an empty `problem` ends it."""
        left = {"checkpoints": checkpoints, "objects": objects, "error": problem}
        known, self.undeleted = self.undeleted, left if problem else {}
        if problem and not known:
            _LOGGER.warning("the store does not delete: %s", problem)
            self._role.emit_event("store", f"the store does not delete, and keeps more than it should: {problem}")
        if self.undeleted != known:
            self.show()

    def show(self, **news: Any) -> None:
        always = {"durable": self.durable, "best": self.best, "undeleted": self.undeleted}
        status = {name: value for name, value in always.items() if value} | self._outage | news
        keys = RunKeys(self._role.run_id)
        write_small(self._role.redis, keys, keys.store_status, "SET", json.dumps(status))
