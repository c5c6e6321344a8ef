"""The keeper of the embedded Redis and S3 server: one that dies or hangs is started again on its port, over its data.

Each has a thread of its own, because whoever else could look after them waits for Redis while that is gone. The roles
wait it out: for Redis `redis.retry_seconds`, and the trainer's uploads without end.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import redis

from coordinator.preparation import connect_once
from coordinator.services import Service, ServiceError, Silence
from shared.config import Config
from shared.errors import StagecoachError
from shared.events import emit
from shared.launch import rotate_in_place
from shared.printable import counted
from shared.restarts import RestartBound, learning_progress
from shared.role import Role

_LOGGER = logging.getLogger("stagecoach.coordinator")
_LOOK_SECONDS = 0.1
_ROTATE_SECONDS = 5.0
"""Time between two looks at the size of the logs that are not this process's own."""
_ASK_SECONDS = 1.0
"""Time between two questions to a service whether it still serves."""


class Keeper:
    """Watches services of this process; gives up on one that dies again and again while the run gets nowhere.

    Rotates `logs` as well, which services, and what they start, append to.
    """

    def __init__(self, services: Sequence[Service], config: Config, logs: Sequence[Path] = ()) -> None:
        self._services = services
        self._logs = logs
        self._config = config
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.failure: str | None = None
        """Why the run cannot go on."""

    def start(self, role: Role, give_up: Callable[[], None]) -> None:
        """Begins to watch; `give_up` is called when a service cannot be kept alive."""
        rotating = threading.Thread(target=self._rotate, name="log-rotation", daemon=True)
        rotating.start()
        self._threads.append(rotating)
        for service in self._services:
            watched = _Watched(service, role, self._config, self._stop)
            arguments = (watched, give_up)
            thread = threading.Thread(target=self._run, args=arguments, name=f"keeper-{service.name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Ends the watching. What was started again ends with its thread, so nobody may need it any more."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _rotate(self) -> None:
        while not self._stop.wait(_ROTATE_SECONDS):
            for path in self._logs:
                with suppress(OSError):
                    rotate_in_place(path)

    def _run(self, watched: _Watched, give_up: Callable[[], None]) -> None:
        try:
            watched.run()
        except Exception as error:
            _LOGGER.exception("an embedded service is given up")
            self.failure = self.failure or str(error)
            give_up()
            self._stop.wait()


class _Watched:
    """One service, and what is known of it."""

    def __init__(self, service: Service, role: Role, config: Config, stop: threading.Event) -> None:
        self._service, self._role, self._stop = service, role, stop
        self._bound = RestartBound(config.rollout.restarts_allowed)
        self._patience = config.rollout.service_silent_seconds
        self._asked, self._silence = 0.0, Silence()

    def run(self) -> None:
        """Until the keeper is stopped; raises `ServiceError` where the service is given up."""
        while not self._stop.wait(_LOOK_SECONDS):
            if not self._service.alive:
                self._start_again(f"ended (code {self._service.process.returncode})")
            elif time.monotonic() - self._asked >= _ASK_SECONDS:
                self._ask()

    def _ask(self) -> None:
        """Whether it serves, and how far the run has come with it."""
        if self._silence.ask(lambda: self._service.ready(self._service.port), self._service.process.pid):
            self._notice_progress()
        elif self._service.alive and self._silence.seconds >= self._patience:
            self._end_the_hung()
        self._asked = time.monotonic()

    def _end_the_hung(self) -> None:
        seconds = self._silence.seconds
        _LOGGER.warning("%s has hung: it has not answered for %.0f s", self._service.name, seconds)
        with suppress(ProcessLookupError):
            os.kill(self._service.process.pid, signal.SIGKILL)  # one that is stopped hears nothing else
        self._service.process.wait()
        self._start_again(f"hung (no answer for {seconds:.0f} s, rollout.service_silent_seconds)")

    def _notice_progress(self) -> None:
        with suppress(StagecoachError, redis.RedisError), connect_once(self._role, "coordinator") as client:
            self._bound.saw(learning_progress(client, self._role.run_id))

    def _start_again(self, how: str) -> None:
        name, words, self._silence = self._service.name, self._service.last_words(), Silence()
        if self._bound.ended():
            raise ServiceError(
                f"{name} {how}, {counted(self._bound.ends, 'time')} in a row without progress of the run "
                f"(rollout.restarts_allowed); it says: {words}"
            )
        _LOGGER.warning("%s %s: %s", name, how, words)
        try:
            self._service.start_again()
        except ServiceError as error:
            _LOGGER.warning("%s", error)  # the next look tries again, within the bound
            return
        try:
            with connect_once(
                self._role, "coordinator"
            ) as client:  # if Redis is gone again, nobody else brings it back
                emit(client, self._role.run_id, "service", f"{name} {how} and was started again over its data")
        except (StagecoachError, redis.RedisError) as error:
            _LOGGER.warning("the event could not be told: %s", error)
