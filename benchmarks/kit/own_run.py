"""Runs of a benchmark's own: an embedded Redis, a store, and runs that exist in them and whose roles are not started.

A benchmark plays the roles itself, or starts them as processes from the launch that `new_run` answers.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import redis

from stagecoach.coordinator.lifecycle.preparation import prepare_new
from stagecoach.coordinator.lifecycle.validation import check
from stagecoach.coordinator.services.embedded import BUCKET, SocketFolder, new_secret, start_redis, start_s3
from stagecoach.coordinator.services.memory_folder import open_memory
from stagecoach.shared.base.address import Address
from stagecoach.shared.config.loading import parse_config
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.runtime.launch import LOGS, RoleLaunch
from stagecoach.shared.runtime.run_context import open_run_context


@dataclass(frozen=True)
class Services:
    """What is running, and what opens it."""

    folder: Path
    redis_url: str
    redis_password: str
    redis_pid: int
    s3_endpoint: str | None
    """None where the store is a folder."""
    keys: Path
    """The file with all credentials."""
    memory: str | None
    """The folder in shared memory, where there is one."""

    def client(self) -> redis.Redis:
        """A plain connection, without what the product adds."""
        return redis.Redis.from_url(self.redis_url, password=self.redis_password)

    def new_run(
        self, given: Config | dict[str, Any], endpoint_url: str | None = None, shared_memory: bool = True
    ) -> RoleLaunch:
        """A run that is ready for its roles; `endpoint_url` is how these reach the S3 server, if not directly."""
        config = given if isinstance(given, Config) else parse_config(given)
        run_id = f"run-{new_secret()[:8]}"
        folder = self.folder / run_id
        (folder / LOGS).mkdir(parents=True)
        store = f"s3://{BUCKET}/{run_id}" if self.s3_endpoint else f"file://{self.folder / 'store'}"
        address = Address(run_id, self.redis_url, store, endpoint_url or self.s3_endpoint, str(self.keys))
        address = replace(address, memory_folder=self.memory if shared_memory else None)
        role = open_run_context(config, address, "coordinator")
        prepare_new(role, check(config))
        role.redis.close()
        return RoleLaunch(config.model_dump(mode="json"), address, (os.getcwd(),), str(folder))


@contextmanager
def own_services(s3: bool = False) -> Iterator[Services]:
    """The services as `stagecoach train` starts them, in a temporary folder; they end with the block."""
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as name:
        folder, password, access, secret = Path(name), new_secret(), new_secret(), new_secret()
        keys = folder / "keys.json"
        keys.write_text(
            json.dumps(
                {"redis_password": password} | ({"s3_access_key": access, "s3_secret_key": secret} if s3 else {})
            )
        )
        (folder / "store").mkdir()
        here = SocketFolder()
        server = start_redis(folder / "redis", folder / "redis.log", password, here.socket)
        try:
            store = start_s3(folder / "s3", folder / "s3.log", access, secret) if s3 else None
            memory = open_memory(folder / "redis")
            try:
                endpoint = f"http://127.0.0.1:{store.port}" if store else None
                path = str(memory.path) if memory is not None else None
                yield Services(folder, here.url, password, server.process.pid, endpoint, keys, path)
            finally:
                if memory is not None:
                    memory.close()
                if store is not None:
                    store.stop()
        finally:
            server.stop()
            here.close()
