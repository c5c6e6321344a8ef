"""The keeper of the fleet: an embedded Ray that dies or hangs is started again, with a new fleet on it.

The roles of the dead Ray end with it; those of the new one go on from the newest checkpoint and the log, as after any
other death. It is the run that goes on: nothing is finished, the services stay.
"""

from __future__ import annotations

import logging
import threading

from coordinator.capacity import Additions
from coordinator.fleet import Fleet, RayLost
from coordinator.ray_head import RayHead
from shared.errors import StagecoachError
from shared.events import emit
from shared.failure import RunEnd
from shared.launch import RoleLaunch
from shared.printable import counted
from shared.restarts import RestartBound, learning_progress
from shared.role import Role

_LOGGER = logging.getLogger("stagecoach.coordinator")


class FleetKeeper:
    """Runs one fleet after another; `run` is the coordinator's life where roles are Ray actors."""

    def __init__(self, role: Role, launch: RoleLaunch, head: RayHead, additions: Additions) -> None:
        self._role = role
        self._launch = launch
        self._head = head
        self._additions = additions
        self._bound = RestartBound(role.config.rollout.restarts_allowed)
        self._bound.saw(learning_progress(role.redis, role.run_id))
        self._fleet: Fleet | None = Fleet(role, launch, head, additions)

    def run(self, abandon: threading.Event) -> RunEnd:
        """Until the run has ended; returns why. Raises what Ray raises where it dies again and again."""
        while True:
            try:
                self._fleet = self._fleet or Fleet(self._role, self._launch, self._head, self._additions)
                return self._fleet.run(abandon)
            except Exception as error:
                if abandon.is_set():
                    return RunEnd("abandoned")
                if not self._head.lost(notice=True):
                    raise
                self._fleet = None
                self._restart_ray(error)

    def kill(self) -> None:
        """Ends all roles at once."""
        if self._fleet is not None and not self._head.lost():
            self._fleet.kill()

    def _restart_ray(self, error: Exception) -> None:
        text = self._head.fate
        self._bound.saw(learning_progress(self._role.redis, self._role.run_id))
        if self._bound.ended():
            often = f"{counted(self._bound.ends, 'time')} in a row without progress of the run"
            often += " (rollout.restarts_allowed)"
            raise RayLost(f"{text}, {often}; see its log") from error
        _LOGGER.warning("%s; starting it again", text)
        emit(self._role.redis, self._role.run_id, "service", f"{text}; it is started again, with new roles")
        try:
            self._head.start_again()
        except StagecoachError as failed:
            if not self._head.lost():
                raise
            _LOGGER.warning("Ray does not start again: %s", failed)
