"""The run's Ray: an embedded head on this machine, or an existing cluster.

Ray is imported while an embedded head starts.
"""

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
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
from stagecoach.shared.base import world
from stagecoach.shared.base.errors import UserError
from stagecoach.shared.base.process import keeping_sigterm, signals_after
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.runtime.zygote import HeldZygote

_EMBEDDED_CPUS = 64
"""Embedded CPUs are nominal: the operating system shares the cores, and Ray must not refuse workers."""
_NOTICE_SECONDS = 3.0
"""Time for `ray start --block` to exit: it checks the raylet and the GCS once a second."""
_SETTLE_SECONDS = 0.2
"""Time for Ray to end after a role that ended with it."""
_PARTS = {"raylet", "gcs_server"}
_WATCH_SECONDS = 1.0
"""Time between health checks."""
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""HTTP/2 client preface (RFC 9113, 3.4); a working gRPC server replies with its settings, token or not."""
_LEAVE_SECONDS = 50.0
"""Ray ends this process after 60 s without a GCS; disconnecting lasts at most 10 s."""
_DIED = "Ray has died"
_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_RAYLET_PID")
_LOGGER = logging.getLogger("stagecoach.coordinator")


class RayHead:
    """This process's Ray: an embedded head, which it launches, or an existing cluster.

    A process drives one Ray at a time: its runs share it, and the last run to end leaves it (`hold_ray`, `release`). A
    Ray that other code has already joined is used as it is.
    """

    def __init__(self, config: Config) -> None:
        self._address, self._cpus = config.ray.address, config.ray.num_cpus
        self._variables = {name: os.environ.get(name) for name in _VARIABLES}
        """Environment variables of Ray, as they were before its launch."""
        self._logs: Path | None = None
        """Folder of the run that was admitted first."""
        self._silent_seconds = config.rollout.service_silent_seconds
        self._unwatch = world.Event()
        self._foreign = ray_internals.imported() and sys.modules["ray"].is_initialized()
        self._joined = self._foreign
        self._changed = world.Condition(world.RLock())
        self._users, self._leaving = 0, 0
        """Number of runs, and of those that wait for this Ray's replacement."""
        self.generation = 0
        """Number of Rays that died before this one."""
        self.failure = _DIED
        """Description of how Ray was lost."""
        self.nodes: list[dict[str, Any]] = []
        """Embedded Ray's only node, as Ray described it when this process joined."""
        self.zygote = HeldZygote()
        ray_internals.outlive_ray()
        # unused here, and a driver that leaves a dead Ray would wait for both
        os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
        os.environ.setdefault("RAY_enable_metrics_collection", "0")
        embedded = self._address == "embedded" and not self._foreign
        if embedded and (address := os.environ.get("RAY_ADDRESS")):
            warnings.warn(
                f"RAY_ADDRESS={address} is not used: the run starts a Ray of its own. Call ray.init() before it for a "
                f"Ray on this machine, or set ray.address for a cluster (docs/operations/deploy.md)",
                stacklevel=2,
            )
        self._service = self._launch() if embedded else None

    @property
    def embedded(self) -> bool:
        """True if this process started it: one machine, and a GCS that may die during a call."""
        return self._service is not None

    def _launch(self) -> RayService:
        os.environ["RAY_AUTH_MODE"] = "token"
        token = os.environ.setdefault("RAY_AUTH_TOKEN", new_secret() + new_secret())  # of all runs of this process
        cpus = self._cpus or max(_EMBEDDED_CPUS, os.cpu_count() or 1)
        return RayService(cpus, token, ray_internals.stays_on_loopback())

    def admit(self, address: str, logs: Path) -> None:
        """Adds a run; raises `UserError` if it needs another Ray."""
        if address != self._address:
            raise UserError(
                f"ray.address={address}: another run of this process uses ray.address={self._address}, and a process "
                f"joins one Ray at a time; start this run in another process"
            )
        with self._changed:
            self._users += 1
            if self._logs is None:
                self._logs = logs
                if self._service is not None:
                    self._service.keep_logs(logs)

    def release(self) -> None:
        """Removes a run. The last one disconnects and stops an embedded Ray, whose logs move to the folder of the run
        that was admitted first."""
        with _STARTING, self._changed:
            self._users -= 1
            self._changed.notify_all()
            self.end_if_unused()

    def end_if_unused(self) -> None:
        global _head
        with self._changed:
            if self._users:
                return
            _head = None
            self._unwatch.set()
            if ray_internals.imported() and not self._foreign:
                _leave()
            self.zygote.release()
            if self._service is not None:
                self._service.stop()
            if self._logs is None:  # no run was admitted: the program may join another Ray
                for name, value in self._variables.items():
                    os.environ.pop(name, None)
                    os.environ |= {} if value is None else {name: value}

    def lost(self, generation: int, notice: bool = False) -> bool:
        """Returns whether the embedded Ray of this generation has died; `notice` also detects a part's recent death."""
        if self.generation != generation:
            return True
        if self._service is None:
            return False
        # without /proc, only the head's own exit shows it
        patience = (_NOTICE_SECONDS if self.parts() is None else _SETTLE_SECONDS) if notice else 0.0
        deadline = world.monotonic() + patience
        while self._service.alive and (not notice or (parts := self.parts()) is None or parts.keys() >= _PARTS):
            if world.monotonic() >= deadline:
                return False
            world.sleep(0.05)
        return True

    def parts(self) -> dict[str, int] | None:
        """Name → process id of Ray's running parts; None without /proc."""
        assert self._service is not None
        pid = self._service.process.pid
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return None
        return {found.name: int(child) for child in children if (found := process_stat(child)) is not None}

    def _watch(self, places: dict[str, tuple[str, int]], sockets: Sequence[Path], stop: world.Event) -> None:
        """Kills a raylet or GCS that no longer replies, and a Ray whose folder was removed, which starts no processes.

        Their death is then handled like any other. Runs in a thread: callers of Ray wait forever, and end with it.
        """
        silences = {name: Silence() for name in places}
        while not stop.wait(_WATCH_SECONDS):
            parts = self.parts() or {}
            if gone := [path for path in sockets if not path.exists()]:
                self._end(parts.values(), f"Ray's folder was removed ({gone[0]} is missing)")
                return
            for name, pid in parts.items():
                if name not in places or silences[name].ask(partial(_ask_server, *places[name]), pid):
                    continue
                if (seconds := silences[name].seconds) >= self._silent_seconds and not stop.is_set():
                    silent = f"no reply from its {name} for {seconds:.0f} s, rollout.service_silent_seconds"
                    self._end([pid], f"Ray hung ({silent})")
                    return

    def _end(self, pids: Iterable[int], failure: str) -> None:
        self.failure = failure
        _LOGGER.warning("%s; it is ended", failure)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def start_again(self, generation: int) -> int:
        """Replaces the Ray of this generation once all runs have left it; returns the new generation.

        Raises `ServiceError` or `UserError`.
        """
        with self._changed:
            self._leaving += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(
                    lambda: self._leaving >= self._users or self.generation != generation, _LEAVE_SECONDS
                )  # Ray crashes if it is left while another thread uses it
                if self.generation == generation:
                    self._replace()
                    self.generation += 1
            finally:
                self._leaving -= 1
            return self.generation

    def _replace(self) -> None:
        assert self._service is not None
        self._unwatch.set()
        leaving = world.Thread(target=_leave, name="ray-shutdown", daemon=True)
        leaving.start()
        leaving.join(_LEAVE_SECONDS)
        if leaving.is_alive():
            raise ServiceError(f"Ray died, and its driver did not disconnect within {_LEAVE_SECONDS:g} s")
        self._service.stop()
        self.failure, self._joined = _DIED, False
        self._service = self._launch()
        if self._logs is not None:
            self._service.keep_logs(self._logs)
        self.wait()
        self.connect()

    def wait(self) -> None:
        """Waits until embedded Ray serves; raises `ServiceError`."""
        with self._changed:
            if self._service is not None and not self._joined:
                _ray()
                self._service.wait()
                _LOGGER.info("Ray serves")

    def connect(self) -> None:
        """Makes this process a driver; raises `UserError` if it cannot join."""
        with self._changed:
            if not self._joined:
                self._join()
                self._joined = True

    def _join(self) -> None:
        service = self._service
        # prints would garble the live view
        ray_internals.redirect_prints(lambda line: _LOGGER.warning("Ray: %s", line))
        join(self._address if service is None else service.address, job_config=ray_internals.job_config())
        if service is not None:
            self.nodes, (host, _, port) = _ray().nodes(), service.address.rpartition(":")
            (node,) = self.nodes
            raylet = (node["NodeManagerAddress"], int(node["NodeManagerPort"]))
            self._unwatch = world.Event()
            named = (Path(node[name]) for name in ("RayletSocketName", "ObjectStoreSocketName"))
            sockets = [path for path in named if path.exists()]
            watched = ({"raylet": raylet, "gcs_server": (host, int(port))}, sockets, self._unwatch)
            world.Thread(target=self._watch, args=watched, name="ray-watch", daemon=True).start()


_STARTING = world.Lock()
_head: RayHead | None = None


def hold_ray(config: Config, logs: Path) -> RayHead:
    """Returns this process's Ray for one more run, launched for the first; raises `UserError` or `ServiceError`."""
    global _head
    with _STARTING:
        _head = _head or RayHead(config)
        _head.admit(config.ray.address, logs)
        return _head


def zygote_token() -> str:
    """Returns the name of the zygote that belongs to this process's Ray; empty without a Ray."""
    return "" if _head is None else _head.zygote.token


def embedded_nodes() -> list[dict[str, Any]]:
    """Returns the node of this process's embedded Ray without asking it; empty without one."""
    return [] if _head is None else _head.nodes


@contextlib.contextmanager
def launched_ahead(config: Config) -> Iterator[None]:
    """Starts this process's Ray, which takes longest of all, while a run is checked; ends it if no run holds it.

    The command line does so even before it imports what checks a run.
    """
    global _head
    try:
        with _STARTING, signals_after():  # or nobody would end it
            _head = _head or RayHead(config)
        yield
    finally:
        with _STARTING, signals_after():
            if _head is not None:
                _head.end_if_unused()


def join(address: str, **options: Any) -> Any:
    """Makes this process a driver of the Ray at `address`; returns `ray.init`'s result. Raises `UserError`."""
    ray = _ray()
    try:
        with signals_after(), keeping_sigterm():  # an exception in the midst of joining would break Ray
            return ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except ray.exceptions.AuthenticationError:
        raise UserError(
            f"Ray at {address} refuses the token; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN (or ~/.ray/auth_token) "
            f"to the cluster's token"
        ) from None
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(
            f"Ray at {address} cannot be joined: {' '.join(str(error).split())}; correct ray.address, or use "
            f"ray.address=embedded"
        ) from None


def _leave() -> None:
    """Disconnects with the garbage collector off: Ray silently exits the process with code 1 if a reference to a result
    or actor is freed after its core is gone."""
    collects = gc.isenabled()
    gc.disable()
    try:
        sys.modules["ray"].shutdown()
    finally:
        if collects:
            gc.enable()


def _ask_server(host: str, port: int) -> None:
    """Raises `OSError` if the gRPC server is silent; the kernel accepts connections for a hung one."""
    with socket.create_connection((host, port), timeout=ASK_SECONDS) as connection:
        connection.sendall(_HTTP2)
        if not connection.recv(1):
            raise ConnectionError("the connection was closed")


def _ray() -> Any:
    """Imports Ray, with the current settings and token; an exception in the midst of it would break the module."""
    logging.getLogger("ray.widgets.util").setLevel(logging.WARNING)  # in a notebook it asks for ipywidgets
    with signals_after(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="IProgress not found")  # and so does tqdm, which it imports
        import ray

    ray_internals.reread_settings()
    return ray
