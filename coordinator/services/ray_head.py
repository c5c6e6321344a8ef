"""The run's Ray: an embedded head on this machine, or a cluster that is there already.

Ray itself is imported while an embedded head starts, which takes long enough.
"""

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from stagecoach.coordinator.services import ray_internals
from stagecoach.coordinator.services.embedded import (
    ASK_SECONDS,
    RayService,
    ServiceError,
    Silence,
    new_secret,
    process_stat,
)
from stagecoach.shared.base.errors import UserError
from stagecoach.shared.base.process import keeping_sigterm
from stagecoach.shared.config.run_config import Config

_EMBEDDED_CPUS = 64
"""On one machine the operating system shares the cores: Ray's count must not keep workers from starting."""
_NOTICE_SECONDS = 3.0
"""`ray start --block` checks once a second that the raylet and the GCS are alive, and ends when one is not."""
_SETTLE_SECONDS = 0.2
"""A role that ends with its Ray may be gone a moment before that is."""
_PARTS = {"raylet", "gcs_server"}
_WATCH_SECONDS = 1.0
"""Time between two questions to each of them."""
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""What a client of gRPC says first (RFC 9113, 3.4); a server that is at work says its settings then, token or not."""
_LEAVE_SECONDS = 50.0
"""After sixty without a GCS Ray would end this process; leaving it takes a moment, ten seconds with its metrics on."""
_DIED = "Ray has died"
_LOGGER = logging.getLogger("stagecoach.coordinator")


class RayHead:
    """One run's hold on this process's Ray; a Ray that somebody else has joined in this process is used as it is."""

    def __init__(self, config: Config, logs: Path) -> None:
        global _driver
        with _STARTING:
            if _driver is None and not (ray_internals.imported() and sys.modules["ray"].is_initialized()):
                _driver = _Driver(config, logs)
            self._driver = _driver
            if _driver is not None:
                _driver.admit(self, config.ray.address)
                self._generation = _driver.generation

    @property
    def embedded(self) -> bool:
        """Whether this process has started it: one machine, and a GCS that may die while it is asked something."""
        return self._driver is not None and self._driver.head is not None

    @property
    def fate(self) -> str:
        """Of a Ray that is lost, in words."""
        return _DIED if self._driver is None else self._driver.fate

    def lost(self, notice: bool = False) -> bool:
        """Whether embedded Ray has died; with `notice` also where only a part of it has, just now."""
        driver = self._driver
        return driver is not None and (driver.generation != self._generation or driver.lost(notice))

    def start_again(self) -> None:
        """Leaves the Ray that has died and joins a new one; raises `ServiceError` or `UserError`."""
        assert self._driver is not None
        self._generation = self._driver.start_again(self, self._generation)

    def wait(self) -> None:
        """Until embedded Ray serves, which takes seconds: others start meanwhile. Raises `ServiceError`."""
        if self._driver is not None:
            self._driver.wait()

    def connect(self) -> None:
        """Makes this process a driver; raises `UserError` where it cannot join."""
        if self._driver is not None:
            self._driver.connect()

    def stop(self) -> None:
        """Lets go of Ray. The last run of this process disconnects, and ends an embedded one, whose logs move to the
        folder of the run that launched it."""
        global _driver
        with _STARTING:
            if self._driver is not None and self._driver.dismiss(self):
                _driver = None


class _Driver:
    """This process as the driver of a Ray, launched (where embedded) and joined for the first of its runs.

    A process can be the driver of one Ray at a time: its runs share it, and the last one to end leaves it.
    """

    def __init__(self, config: Config, logs: Path) -> None:
        self._logs, self._address, self._cpus = logs, config.ray.address, config.ray.num_cpus
        self._silent_seconds = config.rollout.service_silent_seconds
        self._unwatch = threading.Event()
        self._joined = False
        self._changed = threading.Condition(threading.RLock())
        self._users, self._leaving = set[RayHead](), set[RayHead]()
        self.generation = 0
        """How many Rays have died before this one."""
        self.fate = _DIED
        ray_internals.outlive_ray()
        # nothing reads Ray's metrics and records of tasks, and a driver that leaves a dead Ray would wait for both
        os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
        os.environ.setdefault("RAY_enable_metrics_collection", "0")
        self.head = self._launch() if config.ray.address == "embedded" else None

    def _launch(self) -> RayService:
        os.environ["RAY_AUTH_MODE"] = "token"
        token = os.environ.setdefault("RAY_AUTH_TOKEN", new_secret() + new_secret())  # one for all runs of this process
        cpus = self._cpus or max(_EMBEDDED_CPUS, os.cpu_count() or 1)
        launch = partial(RayService, self._logs / "ray.log", cpus, token, ray_internals.stays_on_loopback())
        if threading.current_thread() is threading.main_thread():
            return launch()
        launched = Future[RayService]()

        def keep() -> None:  # it ends with the thread that starts it, which must not be that of one run
            try:
                launched.set_result(service := launch())
            except BaseException as error:
                launched.set_exception(error)
            else:
                service.process.wait()

        threading.Thread(target=keep, name="ray-keeper", daemon=True).start()
        return launched.result()

    def admit(self, user: RayHead, address: str) -> None:
        """Counts a run among its users; raises `UserError` for one that needs another Ray."""
        if address != self._address:
            raise UserError(
                f"ray.address={address}: another run of this process uses ray.address={self._address}, and a process "
                f"joins one Ray at a time; start this run in a process of its own"
            )
        with self._changed:
            self._users.add(user)

    def dismiss(self, user: RayHead) -> bool:
        """Lets a user go; leaves Ray, and returns True, where that was the last one."""
        with self._changed:
            if user not in self._users:  # let go before
                return False
            self._users.discard(user)
            self._leaving.discard(user)
            self._changed.notify_all()
            if self._users:
                return False
            self._unwatch.set()
            if ray_internals.imported():
                _leave()
            if self.head is not None:
                self.head.stop()
            return True

    def lost(self, notice: bool) -> bool:
        if self.head is None:
            return False
        # where /proc does not tell, it ends by itself, if it is to
        patience = (_NOTICE_SECONDS if self.parts() is None else _SETTLE_SECONDS) if notice else 0.0
        deadline = time.monotonic() + patience
        while self.head.alive and (not notice or (parts := self.parts()) is None or parts.keys() >= _PARTS):
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        return True

    def parts(self) -> dict[str, int] | None:
        """Name → process id of what runs of it; None where /proc does not tell."""
        assert self.head is not None
        pid = self.head.process.pid
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return None
        return {found.name: int(child) for child in children if (found := process_stat(child)) is not None}

    def _watch(self, places: dict[str, tuple[str, int]], sockets: Sequence[Path], stop: threading.Event) -> None:
        """Ends a raylet or a GCS that does not reply any more; then it has died, and is noticed as such. So is a Ray
        whose folder was removed: what is there works on, and no process can be started any more.

        Runs in a thread of its own: a caller of Ray itself waits without end, and is ended with it.
        """
        silences = {name: Silence() for name in places}
        while not stop.wait(_WATCH_SECONDS):
            parts = self.parts() or {}
            if gone := [path for path in sockets if not path.exists()]:
                self.fate = f"Ray's folder was removed ({gone[0]} is gone)"
                _LOGGER.warning("%s; it is ended", self.fate)
                for pid in parts.values():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                return
            for name, pid in parts.items():
                if name not in places or silences[name].ask(partial(_ask_server, *places[name]), pid):
                    continue
                if (seconds := silences[name].seconds) >= self._silent_seconds and not stop.is_set():
                    said = f"no answer of its {name} for {seconds:.0f} s, rollout.service_silent_seconds"
                    self.fate = f"Ray hung ({said})"
                    _LOGGER.warning("%s; it is ended", self.fate)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    return

    def start_again(self, user: RayHead, generation: int) -> int:
        """Replaces the Ray of this generation, once all its users have left it; returns the new generation."""
        with self._changed:
            self._leaving.add(user)
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._leaving >= self._users or self.generation != generation, _LEAVE_SECONDS
            )  # Ray does not survive that it is left while another thread asks it something
            if self.generation == generation:
                self._replace()
                self.generation += 1
                self._leaving.clear()
            return self.generation

    def _replace(self) -> None:
        assert self.head is not None
        self._unwatch.set()
        leaving = threading.Thread(target=_leave, name="ray-shutdown", daemon=True)
        leaving.start()
        leaving.join(_LEAVE_SECONDS)
        if leaving.is_alive():
            raise ServiceError(f"Ray died, and its driver did not let go within {_LEAVE_SECONDS:g} s")
        self.head.stop()
        self.fate, self._joined = _DIED, False
        self.head = self._launch()
        self.wait()
        self.connect()

    def wait(self) -> None:
        with self._changed:
            if self.head is not None and not self._joined:
                _ray()
                self.head.wait()
                _LOGGER.info("Ray serves")

    def connect(self) -> None:
        with self._changed:
            if not self._joined:
                self._join()
                self._joined = True

    def _join(self) -> None:
        head = self.head
        # not in the midst of the live view
        ray_internals.redirect_prints(lambda line: _LOGGER.warning("Ray: %s", line))
        join(self._address if head is None else head.address, job_config=ray_internals.job_config())
        if head is not None:
            (node,), (host, _, port) = _ray().nodes(), head.address.rpartition(":")
            raylet = (node["NodeManagerAddress"], int(node["NodeManagerPort"]))
            self._unwatch = threading.Event()
            named = (Path(node[name]) for name in ("RayletSocketName", "ObjectStoreSocketName"))
            sockets = [path for path in named if path.exists()]
            watched = ({"raylet": raylet, "gcs_server": (host, int(port))}, sockets, self._unwatch)
            threading.Thread(target=self._watch, args=watched, name="ray-watch", daemon=True).start()


_STARTING = threading.Lock()
_driver: _Driver | None = None


def join(address: str, **options: Any) -> Any:
    """Makes this process a driver of the Ray at `address`; returns what Ray tells of it. Raises `UserError`."""
    ray = _ray()
    try:
        with keeping_sigterm():
            return ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except ray.exceptions.AuthenticationError:
        raise UserError(
            f"Ray at {address} refuses the token; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN (or ~/.ray/auth_token) "
            f"as the cluster has it"
        ) from None
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(
            f"Ray at {address} cannot be joined: {' '.join(str(error).split())}; correct ray.address, or use "
            f"ray.address=embedded"
        ) from None


def _leave() -> None:
    """Disconnects. Meanwhile the garbage collector rests: Ray ends the process at once, with code 1 and without a word,
    where a reference to a result or actor (those of a former fleet, say) is freed while its core is already gone."""
    collects = gc.isenabled()
    gc.disable()
    try:
        sys.modules["ray"].shutdown()
    finally:
        if collects:
            gc.enable()


def _ask_server(host: str, port: int) -> None:
    """Raises `OSError` where the server of gRPC there is silent: the kernel takes connections for one that has hung."""
    with socket.create_connection((host, port), timeout=ASK_SECONDS) as connection:
        connection.sendall(_HTTP2)
        if not connection.recv(1):
            raise ConnectionError("it has closed the connection")


def _ray() -> Any:
    """Ray, with the settings and the token that were made since it was imported."""
    import ray

    ray_internals.reread_settings()
    return ray
