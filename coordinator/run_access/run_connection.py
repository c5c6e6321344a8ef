"""Reads a run wherever its data are: in Redis while it is live, in its store always, also while its services end."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import redis

from stagecoach.coordinator.catalog.run_files import INTERRUPTED_REASON, RunStatus
from stagecoach.coordinator.catalog.run_folder import RunFolder
from stagecoach.coordinator.catalog.run_metrics import Recorded
from stagecoach.coordinator.catalog.status import Status, ended_status, is_supervised, live_status
from stagecoach.coordinator.services.restarter import outage_of_redis
from stagecoach.shared.base import world
from stagecoach.shared.base.address import Address, RoleName
from stagecoach.shared.base.errors import RedisUnavailable, StagecoachError, UserError
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.log_entry import id_order
from stagecoach.shared.protocol.events import Event, oldest_event, read_events, recorded_event
from stagecoach.shared.protocol.redis_client import connect_redis, without_retries
from stagecoach.shared.storage.checkpoint_store import CheckpointStore
from stagecoach.shared.storage.metric_log import EVENTS

AWAY = (RedisUnavailable, redis.ConnectionError, redis.TimeoutError)
_SETTLE_SECONDS = 3.0
"""Time in which the end of a run on other machines becomes visible from here."""
T = TypeVar("T")


class RunConnection:
    """Connections to one run. Thread-safe; reading raises no error because services of the run end."""

    def __init__(self, folder: RunFolder, config: Config) -> None:
        self._folder, self._config = folder, config
        self._lock = world.RLock()
        self._clients: dict[RoleName, redis.Redis] = {}
        """Connections, opened on demand and kept while the run stays at one address."""
        self._connected_to: Address | None = None
        self._unreachable: str | None = None
        """Reason that the Redis of a run on other machines is unreachable."""
        self._recorded = Recorded(EVENTS)

    def client(self, role: RoleName = "viewer") -> redis.Redis | None:
        """Redis of the live run; None where the run is not live or its Redis is gone. Raises one of `AWAY`."""
        folder = self._folder
        with self._lock:
            address = folder.live_address()
            remote = address is None and not folder.live and self._config.redis.url != "embedded"
            if remote:
                address = folder.offline_address(self._config)
            if address != self._connected_to:
                self._clients.clear()  # another thread may still use one, so none is closed here
            self._connected_to, self._unreachable = address, None
            if address is None:
                return None
            try:
                if role not in self._clients:
                    self._clients[role] = connect_redis(address, without_retries(self._config), role)
                client = self._clients[role]
                return client if not remote or is_supervised(client, folder.run_id) else None
            except AWAY as error:
                if folder.live:
                    raise
                self._unreachable = str(error) if folder.remote is not None else None
                return None

    def ordering_client(self) -> redis.Redis:
        """Redis of the live run, with the right to give orders; raises `UserError` where the run is not live."""
        if (client := self.client("coordinator")) is not None:
            return client
        if self._unreachable is not None:
            raise RedisUnavailable(self._unreachable)
        raise UserError(f"run {self._folder.run_id!r} is not live; `{self._folder.continued_by}` continues it")

    @property
    def live(self) -> bool:
        """True while a coordinator supervises the run, here or on another machine."""
        try:
            return self._folder.live or self.client() is not None
        except AWAY:
            return True

    def read(self, read: Callable[[redis.Redis | None, CheckpointStore], T]) -> T:
        """Calls `read` with the Redis of a live run and the store; if that fails, again with the store's own data."""
        client = None
        try:
            try:
                client = self.client()
            except AWAY:
                pass
            return read(client, self._folder.checkpoint_store(self._config))
        except (StagecoachError, redis.RedisError):
            if client is None and self._config.store.url != "embedded":
                raise
            return read(None, self.offline_store())

    def offline_store(self) -> CheckpointStore:
        """The store without the services of a live run: an embedded one is a folder."""
        return self._folder.checkpoint_store(self._config, offline=True)

    def status(self, accounting: bool) -> Status:
        try:
            if (client := self.client()) is not None:
                return live_status(client, self._folder.run_id, accounting).paused(self._outage())
        except AWAY:
            if (outage := self._outage()) is not None:
                return ended_status(self.offline_store()).paused(outage)
        found = self.read(lambda _, store: ended_status(store))
        if found.state is not RunStatus.INTERRUPTED:
            return found
        if self._folder.live:
            who = "its coordinator"
            state = RunStatus.STARTING_OR_ENDING
            return replace(found, state=state, reason=f"{who} is at work", live=True, bottleneck=who)
        found = replace(found, reason=INTERRUPTED_REASON.format(self._folder.continued_by))
        unseen = f"this machine cannot see whether it is live: {self._unreachable}"
        return replace(found, state=RunStatus.UNKNOWN, reason=unseen) if self._unreachable else found

    def _outage(self) -> str | None:
        return outage_of_redis(self._folder.path) if self._folder.live else None

    def settle_seconds(self) -> float:
        """Time without a sign of life after which the run has ended."""
        if self._config.redis.url == "embedded" and self._folder.remote is None:
            return 0.0  # its lock says so
        unknown = self.status(accounting=False).state is RunStatus.UNKNOWN
        return self._config.redis.retry_seconds if unknown else _SETTLE_SECONDS

    def events(self, after: str, kept: list[Event] | None = None) -> list[Event]:
        """All events after an id, oldest first; `kept` are the newest of an ended run."""

        def events(client: redis.Redis | None, store: CheckpointStore) -> list[Event]:
            newest, oldest = kept or [], kept[0].id if kept else None
            if client is not None and kept is None:
                newest = read_events(client, self._folder.run_id, after)
                oldest = oldest_event(client, self._folder.run_id)
            if oldest is None or id_order(oldest) > id_order(after):  # Redis keeps about a thousand, the store has all
                with self._lock:
                    self._recorded.refresh(store.store, 0.0)
                    newest = [recorded_event(*row) for row in self._recorded.rows] + newest
            found = {id_order(event.id): event for event in newest}
            return [event for place, event in sorted(found.items()) if place > id_order(after)]

        return self.read(events)
