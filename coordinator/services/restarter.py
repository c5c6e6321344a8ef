"""Supervision of the embedded Redis and S3 server: a dead or hung one is restarted at its address, over its data.

Each has its own thread, because every other thread waits for Redis during its outage. The roles wait too: for Redis
`redis.retry_seconds`, and the trainer's uploads indefinitely. A file in the run's folder describes the outage of Redis
while it lasts, an event afterwards.
"""

import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import redis

from stagecoach.coordinator.services.embedded import Service, ServiceError, Silence
from stagecoach.shared.base import world
from stagecoach.shared.base.address import RoleName
from stagecoach.shared.base.errors import StagecoachError
from stagecoach.shared.base.local_disk import lacks_room
from stagecoach.shared.base.printable import counted
from stagecoach.shared.protocol.events import emit
from stagecoach.shared.protocol.redis_client import connect_redis, retries, without_retries
from stagecoach.shared.runtime.launch import rotate_in_place
from stagecoach.shared.runtime.restarts import RestartBound, learning_progress
from stagecoach.shared.runtime.run_context import RunContext

_LOGGER = logging.getLogger("stagecoach.coordinator")
_AWAY = (StagecoachError, redis.RedisError)
_FILE = "outage.json"
_SETTLE_SECONDS = 3.0
_REPORTING: dict[Path, world.Lock] = {}
"""Held while an outage of a run is reported; all clients of a process share it."""


def connect_once(context: RunContext, name: RoleName) -> redis.Redis:
    """Connects without retries, since Redis may be down; raises `RedisUnavailable`."""
    return connect_redis(context.address, without_retries(context.config), name)


def _record(context: RunContext, kind: str, text: str) -> None:
    """Emits an event, without retries: the caller must restart Redis if it is down again."""
    try:
        with connect_once(context, "coordinator") as client:
            emit(client, context.run_id, kind, text)
    except _AWAY as error:
        _LOGGER.warning("Redis rejects an event (%s): %s", text, error)


def report_outages(context: RunContext, folder: Path, *clients: redis.Redis) -> None:
    """Reports the outages of Redis that these clients meet from now on."""
    path = folder / _FILE
    path.unlink(missing_ok=True)
    reporting = _REPORTING.setdefault(path, world.Lock())

    @contextmanager
    def away(last_error: str) -> Iterator[None]:
        """Reports an outage and its end; only the first thread that meets it does."""
        if not reporting.acquire(blocking=False):
            yield
            return
        _LOGGER.warning("the run waits for Redis: %s", last_error)
        since = world.unix_time()
        with suppress(OSError):
            path.write_text(json.dumps({"since": since, "last_error": last_error}))
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            world.Thread(target=back, args=(world.unix_time() - since,), name="redis-is-back", daemon=True).start()

    def back(seconds: float) -> None:  # not during the call that has just succeeded
        text = f"Redis was away for {max(0.0, seconds):.0f} s; the run waited and continues"
        _LOGGER.warning("%s", text)
        _record(context, "outage", text)
        world.sleep(_SETTLE_SECONDS)  # other threads see its return a little later
        reporting.release()

    for client in clients:
        retries(client).named.append(away)


def outage_of_redis(folder: Path) -> str | None:
    """Describes the current outage, as in `Redis, since 10:20:30 (45 s): …`; None without an outage."""
    path = folder / _FILE
    try:
        since, text = path.stat().st_mtime, path.read_text()
    except OSError:
        return None
    last_error = "its log in logs/ says why"
    with suppress(ValueError, KeyError, TypeError):  # on a full disk the file is empty
        last_error = lacks_room(folder, 0) or last_error
        outage = json.loads(text)
        since, last_error = float(outage["since"]), str(outage["last_error"])
    clock = time.strftime("%H:%M:%S", time.localtime(since))
    return f"Redis, since {clock} ({max(0.0, world.unix_time() - since):.0f} s): {last_error}"


_POLL_SECONDS = 0.1
_ROTATE_SECONDS = 5.0
"""Time between checks of the logs' sizes."""
_ASK_SECONDS = 1.0
"""Time between health checks of a service."""


class Restarter:
    """Supervises services of this process; calls `give_up` if one keeps dying without progress of the run.

    Also rotates `logs`, to which services and their children append.
    """

    def __init__(
        self, services: Sequence[Service], logs: Sequence[Path], context: RunContext, give_up: Callable[[], None]
    ) -> None:
        self._context, self._give_up = context, give_up
        self._stop = world.Event()
        self.failure: str | None = None
        jobs = {f"restarter-{service.name}": partial(self._run, service) for service in services}
        jobs["log-rotation"] = partial(self._rotate, logs)
        self._threads = [world.Thread(target=job, name=name, daemon=True) for name, job in jobs.items()]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends the supervision. Restarted services end with its threads, so they must not be needed any more."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _rotate(self, logs: Sequence[Path]) -> None:
        while not self._stop.wait(_ROTATE_SECONDS):
            for path in logs:
                with suppress(OSError):
                    rotate_in_place(path)

    def _run(self, service: Service) -> None:
        try:
            self._supervise(service)
        except Exception as error:
            _LOGGER.exception("gave up an embedded service")
            self.failure = self.failure or str(error)
            self._give_up()
            self._stop.wait()

    def _supervise(self, service: Service) -> None:
        rollout = self._context.config.rollout
        bound, silence, asked = RestartBound(rollout.restarts_allowed), Silence(), 0.0
        while not self._stop.wait(_POLL_SECONDS):
            how = None
            if not service.alive:
                how = f"ended (code {service.process.returncode})"
            elif (path := service.socket_path) is not None and not path.exists():
                how = f"lost its socket ({path} was removed)"  # connections live on, and nobody new can connect
                service.stop()
            elif world.monotonic() - asked >= _ASK_SECONDS:
                if silence.ask(partial(service.ready, service.port), service.process.pid):
                    with suppress(*_AWAY), connect_once(self._context, "coordinator") as client:
                        bound.record_progress(learning_progress(client, self._context.run_id))
                elif service.alive and silence.seconds >= rollout.service_silent_seconds:
                    how = f"hung (no reply for {silence.seconds:.0f} s, rollout.service_silent_seconds)"
                    with suppress(ProcessLookupError):
                        os.kill(service.process.pid, signal.SIGKILL)  # a stopped process ignores other signals
                    service.process.wait()
                asked = world.monotonic()
            if how is not None:
                silence = Silence()
                self._start_again(service, how, bound)

    def _start_again(self, service: Service, how: str, bound: RestartBound) -> None:
        log = service.exit_diagnostics()
        if bound.ended():
            raise ServiceError(
                f"{service.name} {how}, {counted(bound.ends, 'time')} in a row without progress of the run "
                f"(rollout.restarts_allowed); its log ends with: {log}"
            )
        _LOGGER.warning("%s %s: %s", service.name, how, log)
        try:
            service.start_again()
        except ServiceError as error:
            _LOGGER.warning("%s", error)  # the next poll retries, within the bound
            return
        _record(self._context, "service", f"{service.name} {how} and was restarted over its data")
