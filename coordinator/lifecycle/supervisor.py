"""The coordinator: starts a run's services and roles, and supervises them until the run has ended."""

import logging
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import redis

from stagecoach.coordinator.catalog.run_folder import RunFolder
from stagecoach.coordinator.catalog.run_metrics import record_events
from stagecoach.coordinator.catalog.status import Status, ended_status, live_status
from stagecoach.coordinator.lifecycle.inline import InlineRoles
from stagecoach.coordinator.lifecycle.preparation import record_failure
from stagecoach.coordinator.lifecycle.run_lease import RunLease
from stagecoach.coordinator.lifecycle.validation import available_cores, excess_workers
from stagecoach.coordinator.services.embedded import BUCKET, Service, SocketFolder, launch_s3, start_redis
from stagecoach.coordinator.services.memory_folder import clear_abandoned_memory, open_memory, recover_memory
from stagecoach.coordinator.services.ray_head import RayHead, hold_ray
from stagecoach.coordinator.services.restarter import Restarter, connect_once, report_outages
from stagecoach.shared.base import world
from stagecoach.shared.base.address import Address
from stagecoach.shared.base.errors import StagecoachError
from stagecoach.shared.base.failure import Failure, FailureKind, RunEnd, reason_in_words
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.protocol.events import Event, read_events, recent_events
from stagecoach.shared.protocol.redis_client import retries
from stagecoach.shared.runtime.launch import LOGS, RoleLaunch, log_to_file
from stagecoach.shared.runtime.run_context import RunContext, open_run_context

_LOGGER = logging.getLogger("stagecoach.coordinator")
_LOGS: list[logging.Handler] = []
"""Log handlers of the live runs; each logs all lines of this process."""
_SHARED_LOGS = ("redis", "s3", "ray", "background")
"""Logs written by embedded services, or by a detached coordinator's whole process."""
_ENDS_WITHIN_SECONDS = 30.0
"""Time for services to end after the program; the last checkpoint has `trainer.grace_seconds` before."""
_LOCK = world.Lock()
_live: list["Coordinator"] = []
_watch: world.Thread | None = None


@dataclass(frozen=True)
class Outcome:
    """End of a run; as text, the reason in words."""

    end: RunEnd
    status: Status
    seconds: float

    def __str__(self) -> str:
        return reason_in_words(self.reason)

    def __repr__(self) -> str:
        return f"<Outcome {self.reason}: {self.status!r}>"

    @property
    def reason(self) -> str:
        """`solved`, `exhausted` (reached `stop_at`), `stopped`, `abandoned`, or `failed: ` and the failure."""
        return self.end.reason

    @property
    def failed(self) -> bool:
        return self.end.failure is not None

    @property
    def users_fault(self) -> bool:
        """True if the environment failed."""
        return self.end.failure is FailureKind.ENVIRONMENT


def coordinator_thread(run_id: str) -> str:
    """Name of the thread that supervises a run."""
    return f"coordinator-{run_id}"


class Coordinator:
    """One start of a run in this process: its services, its roles, and the thread that supervises them.

    `prepare` brings Redis and the store to where a new or a resumed run begins.
    """

    def __init__(
        self, folder: RunFolder, config: Config, prepare: Callable[[RunContext], None], inline: bool,
        begun: Callable[[], None],
    ) -> None:  # fmt: skip
        self._folder, self._config, self._started = folder, config, world.monotonic()
        self._abandoned = world.Event()
        self._clients: list[redis.Redis] = []
        """Clients that stop waiting for Redis once the run is abandoned."""
        self._running = running = ExitStack()
        self.outcome: Outcome | None = None
        self.events: list[Event] = []
        """All events, once the run has ended and Redis is gone."""
        logs = folder.path / LOGS
        running.callback(folder.unlock)
        _LOGS.append(log := log_to_file(str(folder.path), "coordinator", keep=_LOGS))
        running.callback(_LOGS.remove, log)
        if not inline and (excess := excess_workers(config, available_cores())):
            _LOGGER.warning("%s", excess)
            print(f"Warning: {excess}", file=sys.stderr, flush=True)
        try:
            # Services: embedded ones are children of this process; Ray starts first, since it takes longest
            _LOGGER.info("starting services")
            ray_head = None if inline else hold_ray(config, logs)
            if ray_head is not None:
                running.callback(ray_head.release)
            address, services = _start_services(folder, config, logs, running)
            self._context = context = open_run_context(config, address, "coordinator")
            running.callback(context.redis.close)
            self._clients.append(context.redis)
            report_outages(context, folder.path, context.redis)
            self._lease = RunLease(context, self.abandon)

            # Preparation of Redis and the store: the last step that may reject the run
            context.checkpoints.store.check()
            if ray_head is not None:
                ray_head.wait()
            begun()
            data, packed = config.model_dump(mode="json"), config.environment.packed_object
            launch = RoleLaunch(data, address, folder.import_path(), str(folder.path), packed)
            added_machines = 0.0 if ray_head is None else _join(ray_head, launch, config)
            shared_logs = [logs / f"{name}.log" for name in _SHARED_LOGS]
            # no threads before: one could take a signal while Ray, during join, has its own handler
            self._restarter = Restarter(services, shared_logs, context, self.abandon)
            running.callback(self._restarter.stop)
            self.first_event = recent_events(context.redis, context.run_id, 0)
            self._lease.take()
            running.callback(self._lease.release)
            self._lease.keep()
            prepare(context)
            self._lease.take()  # Redis has a new run only now
            _LOGGER.info("the run is prepared; starting roles")

            # Roles: Ray actors, or all in this process
            folder.write_services(address, launch.import_path)
            if ray_head is None:
                inline_roles = InlineRoles(context, str(folder.path))
                self._clients += inline_roles.clients
                supervise = inline_roles.run
            else:
                from stagecoach.coordinator.fleet.fleet import FleetSupervisor

                fleet = FleetSupervisor(context, launch, ray_head, added_machines)
                running.callback(fleet.kill)
                supervise = fleet.run
            running.callback(folder.forget_services)  # runs first at the end: readers then use the store
        except BaseException:
            running.close()
            raise
        name = coordinator_thread(folder.run_id)
        world.Thread(target=self._supervise, args=(supervise,), name=name, daemon=True).start()
        _end_with_program(self)

    def _supervise(self, supervise: Callable[[world.Event], RunEnd]) -> None:
        """Supervises the roles, then stops everything; sets an outcome whatever fails."""
        run_id, client = self._folder.run_id, self._context.redis
        end, status = RunEnd("failed", FailureKind.OTHER), Status(run_id)
        try:
            try:
                end = supervise(self._abandoned)
            except BaseException as error:
                _LOGGER.exception("the coordinator failed")
                end = RunEnd.failed(Failure.of(error))
            if self._restarter.failure is not None:
                end = RunEnd.failed(Failure(FailureKind.OTHER, self._restarter.failure))
            if self._lease.lost is not None:  # the run continues there, so nothing is recorded
                end = RunEnd.failed(Failure(FailureKind.OTHER, f"{self._lease.lost}; the run continues there"))
            elif end.failure is not None:
                record_failure(self._context, end)
                with suppress(StagecoachError, redis.RedisError):  # the store may be what failed
                    status = replace(live_status(client, run_id), live=False)
            with suppress(StagecoachError, redis.RedisError), connect_once(self._context, "viewer") as viewer:
                self.events = read_events(viewer, run_id, self.first_event)
            if not self._abandoned.is_set() and self._lease.lost is None:
                with suppress(StagecoachError):  # the trainer has recorded most of them
                    record_events(self._context.checkpoints.store, run_id, self.events)
            self._running.close()
            status = ended_status(self._folder.checkpoint_store(self._config, offline=True))
        except BaseException as error:
            _LOGGER.exception("stopping the run's services failed")
            status = replace(status, reason=str(error))
        finally:
            status = replace(status, evaluates=self._config.evaluation.enabled)
            self.outcome = Outcome(end, status, world.monotonic() - self._started)

    @property
    def live(self) -> bool:
        return self.outcome is None and not self._abandoned.is_set()

    def end_in_order(self) -> float:
        """Asks the run to end, since the program has ended; returns the seconds it has for that."""
        run_id, again = self._folder.run_id, self._folder.continued_by
        if self._config.environment.given_object is not None:
            again = f"Run.resume({run_id!r}, environment=…)"
        print(
            f"stagecoach: the program ended while run {run_id} was live; it ends with a last checkpoint "
            f"(run.wait() waits for a run). To continue it: {again}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        with suppress(StagecoachError, redis.RedisError):  # it is abandoned later
            self.stop()
        return self._config.trainer.grace_seconds + _ENDS_WITHIN_SECONDS

    def stop(self) -> None:
        """Asks the run to end with a last checkpoint."""
        self._context.flow.order_stop()

    def abandon(self) -> None:
        """Ends the run at once, without a final checkpoint; durable data stay."""
        self._abandoned.set()
        for client in self._clients:
            retries(client).abandon()


def _end_with_program(run: Coordinator) -> None:
    """Ends the run in order once the main thread has ended, if it is still live then."""
    global _watch
    with _LOCK:
        _live[:] = [other for other in _live if other.outcome is None]
        _live.append(run)
        if _watch is None:
            # not a daemon: Python waits for it before it ends the threads and processes that a run needs
            _watch = world.Thread(target=_end_all, name="program-end")
            _watch.start()


def _end_all() -> None:
    threading.main_thread().join()
    for run, seconds in [(run, run.end_in_order()) for run in _live if run.live]:
        deadline = world.monotonic() + seconds
        while run.outcome is None and world.monotonic() < deadline:
            world.sleep(0.05)
        run.abandon()
        while run.outcome is None and world.monotonic() < deadline + _ENDS_WITHIN_SECONDS:
            world.sleep(0.05)


def _start_services(folder: RunFolder, config: Config, logs: Path, running: ExitStack) -> tuple[Address, list[Service]]:
    address = Address(folder.run_id, config.redis.url, config.store.url, config.store.endpoint_url)
    services: list[Service] = []
    clear_abandoned_memory()
    if "embedded" in {config.redis.url, config.store.url}:
        credentials_file, secret = folder.credentials(config)
        address = replace(address, credentials_file=str(credentials_file))
    s3: Service | None = None
    if config.store.url == "embedded":  # serves by the time that Redis does
        data = folder.path / "s3"
        s3 = launch_s3(data, logs / "s3.log", secret["s3_access_key"], secret["s3_secret_key"])
        running.callback(s3.stop)
        address = replace(address, store_url=f"s3://{BUCKET}", store_folder=str(data))
    if config.redis.url == "embedded":
        data = folder.path / "redis"
        recover_memory(data)
        running.callback((here := SocketFolder()).close)
        services.append(service := start_redis(data, logs / "redis.log", secret["redis_password"], here.socket))
        running.callback(service.stop)
        address = replace(address, redis_url=here.url, redis_folder=str(data))
        if config.redis.shared_memory and (memory := open_memory(data)) is not None:
            running.callback(memory.close)
            address = replace(address, memory_folder=str(memory.path))
        _LOGGER.info("Redis serves")
    if s3 is not None:
        services.append(s3.wait())
        address = replace(address, endpoint_url=f"http://127.0.0.1:{s3.port}")
        _LOGGER.info("the S3 server serves")
    return address, services


def _join(head: RayHead, launch: RoleLaunch, config: Config) -> float:
    """Joins Ray and checks its machines and capacity; returns its autoscaler's limit."""
    from stagecoach.coordinator.diagnostics.preflight import check_machines
    from stagecoach.coordinator.fleet.capacity import autoscaler_limit, check_capacity

    head.connect()
    _LOGGER.info("Ray is joined")
    if config.ray.address != "embedded":  # embedded: this machine, which was checked already
        check_machines(launch)
    check_capacity(config, limit := autoscaler_limit(config))
    return limit
