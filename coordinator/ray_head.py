"""The run's Ray: an embedded head on this machine, or a cluster that is there already.

Ray itself is imported while an embedded head starts, which takes long enough.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from coordinator.ray_start import outlive_ray
from coordinator.services import (
    ASK_SECONDS,
    LOOPBACK_VARIABLE,
    RayService,
    ServiceError,
    Silence,
    StartingRay,
    begin_ray,
    new_secret,
    process_stat,
)
from shared.config import Config
from shared.errors import UserError
from shared.user_code import SOURCE

_EMBEDDED_CPUS = 64
"""On one machine the operating system shares the cores: Ray's count shall not keep workers from starting."""
_SETTINGS = {
    # Nobody reads Ray's record of its tasks, and a driver that leaves a dead Ray would wait for it to be taken.
    "RAY_task_events_report_interval_ms": "0",
}
_NOTICE_SECONDS = 3.0
"""`ray start --block` looks once a second whether the raylet and the GCS are alive, and ends when one is not."""
_SETTLE_SECONDS = 0.2
"""A role that ends with its Ray may be gone a moment before that is."""
_PARTS = {"raylet", "gcs_server"}
_WATCH_SECONDS = 1.0
"""Time between two questions to each of them whether it still answers."""
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""What a client of gRPC says first (RFC 9113, 3.4); a server that is at work says its settings then, token or not."""
_LEAVE_SECONDS = 50.0
"""Leaving a dead Ray takes its driver ten seconds; after sixty without a GCS it would end this process."""


_LOGGER = logging.getLogger("stagecoach.coordinator")


class RayHead:
    """Launches (where embedded) and connects to Ray; one that this process is connected to already is used as it is."""

    def __init__(self, config: Config, logs: Path) -> None:
        self._logs = logs
        self._config = config
        self._owned = "ray" not in sys.modules or not sys.modules["ray"].is_initialized()
        self._address = config.ray.address
        self._starting: StartingRay | None = None
        self._head: RayService | None = None
        self._watching = threading.Event()
        """Set where the present Ray is watched no more."""
        self.fate = "Ray has died"
        """What to say of a Ray that is lost."""
        if self._owned:
            outlive_ray()
        for name, value in _SETTINGS.items() if self._owned else ():
            os.environ.setdefault(name, value)
        if self._owned and self._address == "embedded":
            self._begin()

    def _begin(self) -> None:
        cpus = self._config.ray.num_cpus or max(_EMBEDDED_CPUS, os.cpu_count() or 1)
        os.environ["RAY_AUTH_MODE"] = "token"
        token = os.environ.setdefault("RAY_AUTH_TOKEN", new_secret() + new_secret())  # one for all runs of this process
        self._starting = begin_ray(self._logs / "ray.log", cpus, token, _stays_on_loopback())

    def wait(self) -> None:
        """Until embedded Ray serves, which takes seconds: others start meanwhile. Raises `ServiceError`."""
        if self._starting is not None:
            _ray()
            starting, self._starting = self._starting, None
            self._head = starting.wait()
            self._address = self._head.address
            _LOGGER.info("Ray serves")

    @property
    def embedded(self) -> bool:
        """Whether this process has started it: one machine, and a GCS that may die while it is asked something."""
        return self._head is not None

    def lost(self, notice: bool = False) -> bool:
        """Whether embedded Ray has died; with `notice` also where only a part of it has, just now."""
        if self._head is None:
            return False
        deadline = time.monotonic() + (_SETTLE_SECONDS if notice else 0.0)
        while (whole := self._whole()) and time.monotonic() < deadline:
            time.sleep(0.05)
        if whole is None:  # nobody can tell us here: it ends by itself, where it is to
            deadline = time.monotonic() + (_NOTICE_SECONDS if notice else 0.0)
            while self._head.service.alive and time.monotonic() < deadline:
                time.sleep(0.1)
        return not self._head.service.alive or (notice and whole is False)

    def _whole(self) -> bool | None:
        """Whether raylet and GCS are there; None where /proc does not tell."""
        assert self._head is not None
        parts = self._parts()
        if parts is None:
            return None if self._head.service.alive else False
        return parts.keys() >= _PARTS

    def _parts(self) -> dict[str, int] | None:
        """Name → process id of what runs of it; None where /proc does not tell."""
        assert self._head is not None
        pid = self._head.service.process.pid
        found: dict[str, int] = {}
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return None
        for child in children:
            if (stat := process_stat(child)) is not None:
                found[stat.name] = int(child)
        return found

    def _watch(self, places: dict[str, tuple[str, int]], stop: threading.Event) -> None:
        """Ends a raylet or a GCS that does not answer any more; then it has died, and is noticed as such.

        A thread of its own, since who asks them by Ray itself waits without end, and is ended with them.
        """
        silences = {name: Silence() for name in places}
        patience = self._config.rollout.service_silent_seconds
        while not stop.wait(_WATCH_SECONDS):
            for name, pid in (self._parts() or {}).items():
                if name not in places or silences[name].ask(lambda: _answers(*places[name]), pid):  # noqa: B023
                    continue
                if (seconds := silences[name].seconds) >= patience and not stop.is_set():
                    self.fate = (
                        f"Ray hung (no answer of its {name} for {seconds:.0f} s, rollout.service_silent_seconds)"
                    )
                    _LOGGER.warning("%s; it is ended", self.fate)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    return

    def start_again(self) -> None:
        """Leaves the Ray that has died and joins a new one; raises `ServiceError` or `UserError`."""
        assert self._head is not None
        self._watching.set()
        leaving = threading.Thread(target=_ray().shutdown, name="ray-shutdown", daemon=True)
        leaving.start()
        leaving.join(_LEAVE_SECONDS)
        if leaving.is_alive():
            raise ServiceError(f"Ray died, and its driver did not let go within {_LEAVE_SECONDS:g} s")
        self._head.stop()
        self.fate = "Ray has died"
        self._begin()
        self.connect()

    def connect(self) -> None:
        """Makes this process a driver; raises `UserError` where the cluster does not answer."""
        if not self._owned:
            return
        self.wait()
        ray = _ray()
        ray._private.worker.print_to_stdstream = _to_log
        try:
            ray.init(address=self._address, log_to_driver=False, logging_level=logging.ERROR, job_config=_own_path(ray))
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
        if self._head is not None:
            (node,), (host, _, port) = ray.nodes(), self._head.address.rpartition(":")
            raylet = (node["NodeManagerAddress"], int(node["NodeManagerPort"]))
            self._watching = threading.Event()
            watched = ({"raylet": raylet, "gcs_server": (host, int(port))}, self._watching)
            threading.Thread(target=self._watch, args=watched, name="ray-watch", daemon=True).start()

    def stop(self) -> None:
        """Disconnects, and ends an embedded Ray; its logs move to the run's folder."""
        if not self._owned:
            return
        self._watching.set()
        if "ray" in sys.modules:
            sys.modules["ray"].shutdown()
        if self._starting is not None:
            self._starting.stop()
        if self._head is not None:
            self._head.stop()


def _answers(host: str, port: int) -> None:
    """Raises `OSError` where the server of gRPC there does not: the kernel takes connections for one that has hung."""
    with socket.create_connection((host, port), timeout=ASK_SECONDS) as connection:
        connection.sendall(_HTTP2)
        if not connection.recv(1):
            raise ConnectionError("it has closed the connection")


def _to_log(said: dict[str, Any], ignore_prefix: bool) -> None:
    """What Ray would print in the midst of the live view, whatever it is told: that a process has died, mostly."""
    for line in said["lines"]:
        _LOGGER.warning("Ray: %s", line.strip().partition("\n")[0])  # not the state of its node, a page of it


class _Fixed(list[str]):
    """A list to which nothing is added: Ray would put the folder where the user stands before all others."""

    def extend(self, folders: Iterable[str]) -> None:
        pass


def _own_path(ray: Any) -> Any:
    """Where the processes of Ray find Stagecoach, whatever is called `shared` in the folder where the user stands."""
    return ray.job_config.JobConfig(_py_driver_sys_path=_Fixed([str(SOURCE)]))


def _ray() -> Any:
    """Ray. It reads settings and token while it is imported, perhaps long before we made them: it looks again."""
    import ray

    raylet: Any = ray._raylet
    raylet.AuthenticationTokenLoader.instance().reset_cache()
    raylet.Config.initialize("")
    return ray


def _stays_on_loopback() -> bool:
    """Whether a driver in this process does: settled once Ray is imported, up to us until then."""
    if "ray" not in sys.modules:
        return os.environ.setdefault(LOOPBACK_VARIABLE, "0") == "0"
    from ray._private import ray_constants

    return not ray_constants.ENABLE_RAY_CLUSTER
