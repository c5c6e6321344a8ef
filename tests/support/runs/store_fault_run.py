"""A run whose S3 store stands behind a fault proxy."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stagecoach.coordinator.catalog.status import Status, live_status
from stagecoach.coordinator.services.embedded import BUCKET, new_secret
from stagecoach.shared.base.address import Address
from stagecoach.shared.base.errors import CheckpointNotFound
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.runtime.run_context import RunContext, open_run_context
from stagecoach.shared.storage.checkpoint_store import CHECKPOINTS, FINISHED, MANIFEST, CheckpointStore
from stagecoach.shared.storage.object_store import open_store
from tests.conftest import RedisServer, minimal_config
from tests.support.runs.builders import make_run
from tests.support.runs.game import POLICY, Game, small
from tests.support.services.store_faults import StoreFaults
from tests.support.suite.speed import stretched

PATIENCE_SECONDS = stretched(60.0)
VERSIONS = 16


class StoreFaultRun:
    def __init__(self, redis_server: RedisServer, server: tuple[str, str, str], folder: Path, config: Config) -> None:
        keys = {"redis_password": redis_server.password, "s3_access_key": server[1], "s3_secret_key": server[2]}
        (folder / "keys.json").write_text(json.dumps(keys))
        self.proxy, self.config = StoreFaults(server[0]), config
        run_id = f"t-{new_secret()[:12]}"
        self._address, direct = (
            Address(run_id, redis_server.url, f"s3://{BUCKET}/chaos", endpoint, str(folder / "keys.json"))
            for endpoint in (self.proxy.url, server[0])
        )
        self.reader = CheckpointStore(open_store(direct, minimal_config()), run_id)
        """Past the proxy."""
        make_run(config, self._address).redis.close()
        self.games: list[Game] = []

    def open(self) -> RunContext:
        return open_run_context(self.config, self._address)

    def game(self) -> Game:
        self.games.append(Game(self.open))
        return self.games[-1]

    def status(self) -> Status:
        with contextlib.closing(self.open().redis) as client:
            return live_status(client, self._address.run_id)

    def finish(self, game: Game) -> str:
        """Plays to the end; answers the SHA-256 of the final policy, read past the proxy."""
        game.play()
        game.trainer.finish(game.role.flow.read().reason or "exhausted")
        return hashlib.sha256(self.reader.load(self.final()).objects[POLICY]).hexdigest()

    def final(self) -> str:
        return str((self.reader.marker(FINISHED) or {})["final"])

    def nothing_is_half_visible(self) -> None:
        """Checks that every manifest is complete, and that the pointer names one."""
        for name in self.reader.names():
            try:
                self.reader.load(name)
            except CheckpointNotFound:
                continue
        pointer = self.reader.pointer()
        if pointer is not None and any(key.endswith(MANIFEST) for key in self.reader.store.keys(CHECKPOINTS)):
            self.reader.load(pointer.latest)

    def close(self) -> None:
        self.proxy.heal()
        for game in self.games:
            game.end()
        self.proxy.close()


MakeSite = Callable[..., StoreFaultRun]


def short_run(updates: int = VERSIONS, **sections: Any) -> Config:
    """A small run that stores each version, prunes the one before, and gives a request up at once."""
    store = {"retries": 0, "timeout_seconds": 20}
    checkpoint = {"every": "1 updates", "keep_last": 1}
    return small(**({"stop_at": {"updates": updates}, "store": store, "checkpoint": checkpoint} | sections))
