"""The keeper of the embedded Redis and S3 server: one that dies is started again on its port, over its data.

It has a thread of its own, because whoever else could look after them waits for Redis while that is gone. The roles
ride it out: they try again for `redis.retry_seconds`, and the trainer's uploads without end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import redis

from coordinator.preparation import connect_once
from coordinator.services import Service, ServiceError
from shared.config import Config
from shared.errors import RedisUnavailable
from shared.events import emit
from shared.rate import Rate
from shared.role import Role

_LOGGER = logging.getLogger("stagecoach.coordinator")
_LOOK_SECONDS = 0.1


class Keeper:
    """Watches services of this process; gives up on one that dies too often."""

    def __init__(self, services: Sequence[Service], config: Config) -> None:
        rollout = config.rollout
        self._rates = [
            (service, Rate(rollout.restarts_allowed, rollout.restart_window_seconds)) for service in services
        ]
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.failure: str | None = None
        """Why the run cannot go on."""

    def start(self, role: Role, give_up: Callable[[], None]) -> None:
        """Begins to watch; `give_up` is called once, when a service cannot be kept alive."""
        self._thread = threading.Thread(target=self._run, args=(role, give_up), name="keeper", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the watching. What was started again ends with this thread, so nobody may need it any more."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, role: Role, give_up: Callable[[], None]) -> None:
        try:
            while not self._stop.wait(_LOOK_SECONDS):
                for service, rate in self._rates:
                    if not service.alive:
                        self._start_again(service, rate, role)
        except Exception as error:
            _LOGGER.exception("an embedded service is given up")
            self.failure = str(error)
            give_up()
            self._stop.wait()

    def _start_again(self, service: Service, rate: Rate, role: Role) -> None:
        code, words = service.process.returncode, service.last_words()
        if rate.exceeded():
            raise ServiceError(f"{service.name} ends again and again (code {code}); it says: {words}")
        _LOGGER.warning("%s ended with code %s: %s", service.name, code, words)
        try:
            service.start_again()
        except ServiceError as error:
            _LOGGER.warning("%s", error)  # the next look tries again, within the rate
            return
        try:
            text = f"{service.name} ended (code {code}) and was started again over its data"
            with connect_once(role, "coordinator") as client:  # if Redis is gone again, nobody else brings it back
                emit(client, role.run_id, "service", text)
        except (RedisUnavailable, redis.RedisError) as error:
            _LOGGER.warning("the event could not be told: %s", error)
