"""Deleting a run: its folder here, its keys in Redis and its objects in the store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import redis

from coordinator.run import Run
from coordinator.run_folder import RunFolder
from coordinator.run_list import is_all_here
from shared.connection import connect_redis, shard_clients
from shared.errors import UserError
from shared.printable import counted
from shared.redis_keys import RunKeys

_BATCH = 500


@dataclass(frozen=True)
class Deletion:
    """What is about to go; nothing has gone yet."""

    folder: RunFolder
    run: Run | None
    """Where it has something beside its folder: keys in Redis, objects in the store."""
    objects: list[str]

    @classmethod
    def of(cls, run_id: str, runs_dir: Path) -> Deletion:
        """Raises `RunNotFound`, or `UserError` for a run that is live."""
        folder = RunFolder.find(run_id, runs_dir)
        try:
            all_here = is_all_here(folder.path)
        except ValueError as error:
            raise UserError(f"{error}; what it has in Redis and a store is not known") from None
        run = None if all_here else Run.attach(run_id, runs_dir)
        if run.live if run else folder.live:
            raise UserError(f"run {run_id!r} is live; end it first: stagecoach stop {run_id}")
        return cls(folder, run, run.checkpoint_store().store.keys("") if run else [])

    @property
    def what(self) -> str:
        """In words, for the person who is asked."""
        places = [str(self.folder.path)]
        if self.run is not None:
            places += [f"{counted(len(self.objects), 'object')} in {self.run.store_location}", "its keys in Redis"]
        return f"run {self.folder.run_id}: {', '.join(places)}"

    def carry_out(self) -> None:
        """First Redis, then the store, the folder last, so that what was cut off can be called again."""
        self.folder.lock()
        try:
            if self.run is not None:
                for client in self._servers(self.run):
                    with client:
                        self._forget(client)
                store = self.run.checkpoint_store().store
                for key in self.objects:
                    store.delete(key)
        except BaseException:
            self.folder.unlock()
            raise
        self.folder.remove()

    @staticmethod
    def _servers(run: Run) -> Iterator[redis.Redis]:
        if run.config.redis.url != "embedded":
            address = run.folder.offline_address(run.config)
            yield connect_redis(address, run.config, "coordinator")
            yield from shard_clients(address, run.config, "coordinator").values()

    def _forget(self, client: redis.Redis) -> None:
        prefix = RunKeys(self.folder.run_id).prefix
        try:
            keys = list(client.scan_iter(f"{prefix}*", count=_BATCH))
            for first in range(0, len(keys), _BATCH):
                client.unlink(*keys[first : first + _BATCH])
        except redis.exceptions.NoPermissionError:
            raise UserError(
                f"Redis does not let this user delete; set STAGECOACH_REDIS_USERNAME and STAGECOACH_REDIS_PASSWORD to "
                f"those of an administrator, or delete the keys {prefix}* yourself and call this again"
            ) from None
