"""The run's Ray: an embedded head on this machine, or a cluster that is there already."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants
from ray._private import worker as ray_worker

from coordinator.services import RayService, ServiceError, StartingRay, begin_ray, new_secret
from shared.config import Config
from shared.errors import UserError

_EMBEDDED_CPUS = 64
"""On one machine the operating system shares the cores: Ray's count shall not keep workers from starting."""
_SETTINGS = {
    # Nobody reads Ray's record of its tasks, and a driver that leaves a dead Ray would wait for it to be taken.
    "RAY_task_events_report_interval_ms": "0",
    # A role that dies a few times would be called again only 5 s after its new process is there: Ray doubles the pause.
    "RAY_task_actor_unavailable_retry_max_delay_ms": "200",
}
_NOTICE_SECONDS = 3.0
"""`ray start --block` looks once a second whether the raylet and the GCS are alive, and ends when one is not."""
_LEAVE_SECONDS = 50.0
"""Leaving a dead Ray takes its driver ten seconds; after sixty without a GCS it would end this process."""


_LOGGER = logging.getLogger("stagecoach.coordinator")


class RayHead:
    """Launches (where embedded) and connects to Ray; one that this process is connected to already is used as it is."""

    def __init__(self, config: Config, logs: Path) -> None:
        self._logs = logs
        self._config = config
        self._owned = not ray.is_initialized()
        self._address = config.ray.address
        self._starting: StartingRay | None = None
        self._head: RayService | None = None
        if self._owned and self._address == "embedded":
            self._begin()
        elif self._owned:
            _configure()

    def _begin(self) -> None:
        token = _token()
        _configure()
        cpus = self._config.ray.num_cpus or max(_EMBEDDED_CPUS, os.cpu_count() or 1)
        loopback = not ray_constants.ENABLE_RAY_CLUSTER  # else Ray was imported before, and is not to be moved
        self._starting = begin_ray(self._logs / "ray.log", cpus, token, loopback)

    def wait(self) -> None:
        """Until embedded Ray serves, which takes seconds: others start meanwhile. Raises `ServiceError`."""
        if self._starting is not None:
            starting, self._starting = self._starting, None
            self._head = starting.wait()
            self._address = self._head.address
            _LOGGER.info("Ray serves")

    @property
    def embedded(self) -> bool:
        """Whether this process has started it: one machine, and a GCS that may die while it is asked something."""
        return self._head is not None

    def lost(self, notice: bool = False) -> bool:
        """Whether embedded Ray has died; with `notice` it is given the time to see that a part of it has."""
        deadline = time.monotonic() + (_NOTICE_SECONDS if notice else 0.0)
        while self._head is not None and self._head.service.alive and time.monotonic() < deadline:
            time.sleep(0.1)
        return self._head is not None and not self._head.service.alive

    def start_again(self) -> None:
        """Leaves the Ray that has died and joins a new one; raises `ServiceError` or `UserError`."""
        assert self._head is not None
        leaving = threading.Thread(target=ray.shutdown, name="ray-shutdown", daemon=True)
        leaving.start()
        leaving.join(_LEAVE_SECONDS)
        if leaving.is_alive():
            raise ServiceError(f"Ray died, and its driver did not let go within {_LEAVE_SECONDS:g} s")
        self._head.stop(self._logs / "ray")
        self._begin()
        self.connect()

    def connect(self) -> None:
        """Makes this process a driver; raises `UserError` where the cluster does not answer."""
        if not self._owned:
            return
        self.wait()
        ray_worker.print_to_stdstream = _to_log  # type: ignore[assignment]
        try:
            ray.init(address=self._address, log_to_driver=False, logging_level=logging.ERROR)
        except ray.exceptions.AuthenticationError:
            raise UserError(
                f"Ray at {self._address} refuses the token; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN (or "
                f"~/.ray/auth_token) as the cluster has it"
            ) from None
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UserError(
                f"Ray at {self._address} cannot be joined: {' '.join(str(error).split())}; correct ray.address, or use "
                f"ray.address=embedded"
            ) from None

    def stop(self) -> None:
        """Disconnects, and ends an embedded Ray; its logs move to the run's folder."""
        if not self._owned:
            return
        ray.shutdown()
        if self._starting is not None:
            self._starting.stop()
        if self._head is not None:
            self._head.stop(self._logs / "ray")


def _to_log(said: dict[str, Any], ignore_prefix: bool) -> None:
    """What Ray would print in the midst of the live view, whatever it is told: that a process has died, mostly."""
    for line in said["lines"]:
        _LOGGER.warning("Ray: %s", line)


def _token() -> str:
    """Turns token authentication on in this process, and answers its token (one for all runs of the process)."""
    os.environ["RAY_AUTH_MODE"] = "token"
    token = os.environ.setdefault("RAY_AUTH_TOKEN", new_secret() + new_secret())
    raylet: Any = ray._raylet
    raylet.AuthenticationTokenLoader.instance().reset_cache()
    return token


def _configure() -> None:
    """Ray reads these while it is imported, which has happened by now, so it is told to look again."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    raylet: Any = ray._raylet
    raylet.Config.initialize("")
