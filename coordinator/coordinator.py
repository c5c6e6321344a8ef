"""The coordinator: what this process starts for a run, and tends until the run has ended.

`Coordinator.launch` is all the wiring: who runs where, in one function.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import redis

from coordinator.inline import InlineRoles, refuse_ranks
from coordinator.keeper import Keeper
from coordinator.preparation import connect_once, record_failure
from coordinator.ray_head import RayHead
from coordinator.redis_outage import tell_of_outages
from coordinator.run_folder import RunFolder
from coordinator.services import BUCKET, Service, start_redis, start_s3
from coordinator.status import Status, ended_status, live_status
from coordinator.tenure import Tenure
from shared.checkpoint import CheckpointStore
from shared.config import Config
from shared.connection import Address, abandon
from shared.errors import StagecoachError
from shared.events import Event, read_events, recent_events
from shared.failure import Failure, FailureKind, RunEnd
from shared.heartbeat import Wait, poll
from shared.launch import LOGS, RoleLaunch, log_to_file
from shared.object_store import open_store
from shared.role import Role, open_role

_LOGGER = logging.getLogger("stagecoach.coordinator")

_SHARED_LOGS = ("redis", "s3", "ray", "background")
"""That embedded services, or all of a detached coordinator's process, print to."""
Supervise = Callable[[threading.Event], RunEnd]
"""Tends the roles until the run ends (or the event says: at once); returns why."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    end: RunEnd
    status: Status
    seconds: float

    @property
    def reason(self) -> str:
        """Why, in words."""
        return self.end.reason

    @property
    def failed(self) -> bool:
        """Whether it ended by an error."""
        return self.end.failure is not None

    @property
    def users_fault(self) -> bool:
        """Whether it was the environment that failed."""
        return self.end.failure is FailureKind.ENVIRONMENT


class Coordinator:
    """One start of a run in this process: its services, its roles, and the thread that tends them."""

    def __init__(self, folder: RunFolder, config: Config) -> None:
        self._folder = folder
        self._config = config
        self._started = time.monotonic()
        self._thread: threading.Thread | None = None
        self._abandon = threading.Event()
        self._leave_services: Callable[[], None] = lambda: None
        """Ends the patience with a Redis or a store that is away."""
        self.outcome: Outcome | None = None
        """How it ended, once it has."""
        self.first_event = "0-0"
        """Where the events of this start of the run begin."""
        self.events: list[Event] = []
        """All of them, once it has ended: nobody can ask Redis then."""

    @classmethod
    def launch(
        cls,
        folder: RunFolder,
        config: Config,
        prepare: Callable[[Role], None],
        inline: bool,
        begun: Callable[[], None],
    ) -> Coordinator:
        """Who runs where. `prepare` brings Redis and the store to where a new or a resumed run begins."""
        made = cls(folder, config)
        logs, running = folder.path / LOGS, ExitStack()
        running.callback(folder.unlock)
        log_to_file(str(folder.path), "coordinator")
        try:
            # Services: embedded ones are children of this process, in the run's folder; Ray takes longest
            _LOGGER.info("starting services")
            if inline:
                refuse_ranks(config)
            ray_head = None if inline else _begin_ray(config, logs, running)
            address, keeper = _start_services(folder, config, logs, running)
            role = open_role(config, address, "coordinator")
            running.callback(role.redis.close)
            made._leave_services = partial(abandon, role.redis)
            tell_of_outages(role, folder.path, role.redis)
            keeper.start(role, made.abandon)
            tenure = Tenure(role)

            # What Redis and the store hold of the run before any role starts; the last thing that may be refused
            role.checkpoints.store.check()
            if ray_head is not None:
                ray_head.wait()
            begun()
            launch = RoleLaunch(config.model_dump(mode="json"), address, folder.import_path(), str(folder.path))
            additions = None if ray_head is None else _join(ray_head, launch, config)
            made.first_event = recent_events(role.redis, role.run_id, 0)
            tenure.take()
            running.callback(tenure.release)
            tenure.keep(made.abandon)
            prepare(role)
            tenure.take()  # a new run is there only now
            _LOGGER.info("the run is prepared; starting roles")

            # Roles: Ray actors, or all in this process
            folder.write_services(address, launch.import_path)
            supervise: Supervise
            if ray_head is None:
                inline_roles = InlineRoles(role, str(folder.path))
                supervise, made._leave_services = inline_roles.run, inline_roles.leave_services
            else:
                supervise = _start_fleet(launch, role, ray_head, additions, running)
            running.callback(folder.forget_services)  # first of all, at the end: who looks then reads the store
        except BaseException:
            running.close()
            raise
        made._thread = threading.Thread(
            target=made._supervise,
            args=(supervise, role, keeper, tenure, running),
            name=f"coordinator-{folder.run_id}",
            daemon=True,
        )
        made._thread.start()
        return made

    def _supervise(self, supervise: Supervise, role: Role, keeper: Keeper, tenure: Tenure, running: ExitStack) -> None:
        """The coordinator's life: tend the roles, then take down what was started. Whatever fails, it has an end."""
        run_id = self._folder.run_id
        end, status = (
            RunEnd("failed", FailureKind.OTHER),
            Status(run_id, "interrupted", "", False, -1, 0, 0, 0, None, ""),
        )
        try:
            try:
                end = supervise(self._abandon)
            except BaseException as error:
                _LOGGER.exception("the coordinator failed")
                end = RunEnd.failed(Failure.of(error))
            if keeper.failure is not None:
                end = RunEnd.failed(Failure(FailureKind.OTHER, keeper.failure))
            if tenure.lost is not None:
                lost = f"{tenure.lost}; it goes on there"  # so nothing of this is recorded
                end = RunEnd.failed(Failure(FailureKind.OTHER, lost))
            elif end.failure is not None:
                record_failure(role, end)
                with suppress(StagecoachError, redis.RedisError):  # the store may be what failed, and cannot tell then
                    status = dataclasses.replace(live_status(role.redis, run_id), live=False)
            with suppress(StagecoachError, redis.RedisError), connect_once(role, "viewer") as client:
                self.events = read_events(client, run_id, self.first_event)
            running.close()
            address = self._folder.offline_address(self._config)
            status = ended_status(CheckpointStore(open_store(address, self._config), run_id))
        except BaseException as error:
            _LOGGER.exception("taking the run down failed")
            status = dataclasses.replace(status, reason=str(error))
        finally:
            self.outcome = Outcome(end, status, time.monotonic() - self._started)

    def abandon(self) -> None:
        """Ends the run at once, without a final checkpoint; what is durable stays."""
        self._abandon.set()
        self._leave_services()

    def wait(self, timeout_seconds: float) -> Outcome:
        """Until the run has ended and everything it started is gone; raises `WaitTimeout`."""
        thread = self._thread
        assert thread is not None
        poll(Wait(f"run {self._folder.run_id} to end", timeout_seconds), lambda: not thread.is_alive(), 0.05)
        assert self.outcome is not None
        return self.outcome


def _start_services(folder: RunFolder, config: Config, logs: Path, running: ExitStack) -> tuple[Address, Keeper]:
    services: list[Service] = []
    redis_url, store_url, endpoint_url = config.redis.url, config.store.url, config.store.endpoint_url
    credentials_file = store_folder = redis_folder = None
    if "embedded" in {redis_url, store_url}:
        credentials_file, secret = folder.credentials(config)
    if redis_url == "embedded":
        redis_folder = str(folder.path / "redis")
        service = start_redis(folder.path / "redis", logs / "redis.log", secret["redis_password"])
        running.callback(service.stop)
        services.append(service)
        redis_url = f"redis://127.0.0.1:{service.port}/0"
        _LOGGER.info("Redis serves")
    if store_url == "embedded":
        store_folder = str(folder.path / "s3")
        service = start_s3(folder.path / "s3", logs / "s3.log", secret["s3_access_key"], secret["s3_secret_key"])
        running.callback(service.stop)
        services.append(service)
        store_url, endpoint_url = f"s3://{BUCKET}", f"http://127.0.0.1:{service.port}"
        _LOGGER.info("the S3 server serves")
    keeper = Keeper(services, config, [logs / f"{name}.log" for name in _SHARED_LOGS])
    running.callback(keeper.stop)
    keys = str(credentials_file) if credentials_file else None
    return Address(folder.run_id, redis_url, store_url, endpoint_url, keys, store_folder, redis_folder), keeper


def _begin_ray(config: Config, logs: Path, running: ExitStack) -> RayHead:
    """Launches it and goes on: it takes seconds, in which the other services start."""
    head = RayHead(config, logs)
    running.callback(head.stop)
    return head


def _join(head: RayHead, launch: RoleLaunch, config: Config) -> Any:
    """Joins Ray, and refuses what its machines cannot do, and more workers than it has room for.

    Embedded Ray is one machine, on which everything has been tried already. Answers what an autoscaler may add.
    """
    from coordinator.capacity import additions, check_room

    head.connect()
    _LOGGER.info("Ray is joined")
    if config.ray.address != "embedded":
        from coordinator.preflight import check_machines

        check_machines(launch)
    found = additions(config)
    check_room(config, found)
    return found


def _start_fleet(launch: RoleLaunch, role: Role, head: RayHead, additions: Any, running: ExitStack) -> Supervise:
    from coordinator.fleet_keeper import FleetKeeper

    keeper = FleetKeeper(role, launch, head, additions)
    running.callback(keeper.kill)
    return keeper.run
