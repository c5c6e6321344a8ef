"""The supervisor of the embedded Redis and S3 server: one that dies or hangs is restarted on its port, over its data.

Each has a thread of its own, because every other one waits for Redis while that is gone. The roles wait it out: for
Redis `redis.retry_seconds`, and the trainer's uploads without end. That Redis is away stands in a file of the run's
folder meanwhile (it cannot be asked), then in an event.
"""

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import redis

from stagecoach.coordinator.services.embedded import Service, ServiceError, Silence
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
_TELLING: dict[Path, threading.Lock] = {}
"""Held while an outage of a run is reported; all clients of a process meet the same one."""


def connect_once(context: RunContext, name: RoleName) -> redis.Redis:
    """A client that tries once, where Redis may be what failed; raises `RedisUnavailable`."""
    return connect_redis(context.address, without_retries(context.config), name)


def _record(context: RunContext, kind: str, text: str) -> None:
    """An event; tried once, since Redis may be gone again, and the caller must bring it back."""
    try:
        with connect_once(context, "coordinator") as client:
            emit(client, context.run_id, kind, text)
    except _AWAY as error:
        _LOGGER.warning("Redis rejects an event (%s): %s", text, error)


def tell_of_outages(context: RunContext, folder: Path, *clients: redis.Redis) -> None:
    """From now on reports the outages that these clients meet."""
    path = folder / _FILE
    path.unlink(missing_ok=True)
    told = _TELLING.setdefault(path, threading.Lock())

    @contextmanager
    def away(last_error: str) -> Iterator[None]:
        """The first thread that meets an outage reports it, and its end."""
        if not told.acquire(blocking=False):
            yield
            return
        _LOGGER.warning("the run waits for Redis: %s", last_error)
        since = time.time()
        with suppress(OSError):
            path.write_text(json.dumps({"since": since, "last_error": last_error}))
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            threading.Thread(target=back, args=(time.time() - since,), name="redis-is-back", daemon=True).start()

    def back(seconds: float) -> None:  # not in the midst of the call that has just come through
        text = f"Redis was away for {max(0.0, seconds):.0f} s; the run waited for it and continues"
        _LOGGER.warning("%s", text)
        _record(context, "outage", text)
        time.sleep(_SETTLE_SECONDS)  # others find it back somewhat later, and name the same outage until then
        told.release()

    for client in clients:
        retries(client).named.append(away)


def outage_of_redis(folder: Path) -> str | None:
    """`Redis, since 10:20:30 (45 s): …`, while the coordinator of this folder's run waits for it; None else."""
    path = folder / _FILE
    try:
        since, text = path.stat().st_mtime, path.read_text()
    except OSError:
        return None
    last_error = "its log in logs/ says why"
    with suppress(ValueError, KeyError, TypeError):  # on a full disk there is the file, and nothing in it
        last_error = lacks_room(folder, 0) or last_error
        told = json.loads(text)
        since, last_error = float(told["since"]), str(told["last_error"])
    clock = time.strftime("%H:%M:%S", time.localtime(since))
    return f"Redis, since {clock} ({max(0.0, time.time() - since):.0f} s): {last_error}"


_POLL_SECONDS = 0.1
_ROTATE_SECONDS = 5.0
"""Time between two polls of the size of the logs that are not this process's own."""
_ASK_SECONDS = 1.0
"""Time between two questions to a service whether it still serves."""


class Restarter:
    """Supervises services of this process; calls `give_up` where one dies again and again without progress of the run.

    It also rotates `logs`, which services, and what they start, append to.
    """

    def __init__(
        self, services: Sequence[Service], logs: Sequence[Path], context: RunContext, give_up: Callable[[], None]
    ) -> None:
        self._context, self._give_up = context, give_up
        self._stop = threading.Event()
        self.failure: str | None = None
        jobs = {f"restarter-{service.name}": partial(self._run, service) for service in services}
        jobs["log-rotation"] = partial(self._rotate, logs)
        self._threads = [threading.Thread(target=job, name=name, daemon=True) for name, job in jobs.items()]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends the supervision. What was started again ends with its thread, so it must not be needed any more."""
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
            _LOGGER.exception("an embedded service is given up")
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
            elif time.monotonic() - asked >= _ASK_SECONDS:
                if silence.ask(partial(service.ready, service.port), service.process.pid):
                    with suppress(*_AWAY), connect_once(self._context, "coordinator") as client:
                        bound.saw(learning_progress(client, self._context.run_id))
                elif service.alive and silence.seconds >= rollout.service_silent_seconds:
                    how = f"hung (no answer for {silence.seconds:.0f} s, rollout.service_silent_seconds)"
                    with suppress(ProcessLookupError):
                        os.kill(service.process.pid, signal.SIGKILL)  # one that is stopped hears nothing else
                    service.process.wait()
                asked = time.monotonic()
            if how is not None:
                silence = Silence()
                self._start_again(service, how, bound)

    def _start_again(self, service: Service, how: str, bound: RestartBound) -> None:
        words = service.last_words()
        if bound.ended():
            raise ServiceError(
                f"{service.name} {how}, {counted(bound.ends, 'time')} in a row without progress of the run "
                f"(rollout.restarts_allowed); it says: {words}"
            )
        _LOGGER.warning("%s %s: %s", service.name, how, words)
        try:
            service.start_again()
        except ServiceError as error:
            _LOGGER.warning("%s", error)  # the next poll tries again, within the bound
            return
        _record(self._context, "service", f"{service.name} {how} and was started again over its data")
