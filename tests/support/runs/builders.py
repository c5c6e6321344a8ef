"""Runs that a test makes by hand: on a given Redis, in a folder or another store, with no coordinator."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from stagecoach.coordinator.services.embedded import new_secret
from stagecoach.rollout_worker.environments.description import describe_environment
from stagecoach.shared.base.address import Address
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.payload_shards import Bodies
from stagecoach.shared.protocol.redis_client import shard_clients
from stagecoach.shared.protocol.shared_memory import SharedMemory
from stagecoach.shared.runtime.run_context import RunContext, open_run_context
from stagecoach.shared.storage.checkpoint_store import ENVIRONMENT


@dataclasses.dataclass(frozen=True)
class RedisServer:
    url: str
    password: str

    def client(self) -> redis.Redis:
        # so patient that nothing is sent twice, and counted twice, where the server's disk stalls
        return redis.Redis.from_url(self.url, password=self.password, socket_timeout=60)


def folder_address(server: RedisServer, folder: Path, run_id: str | None = None) -> Address:
    """Address of a run on this Redis with a file store below `folder`; creates an id if none is given."""
    store, keys = folder / "store", folder / "keys.json"
    store.mkdir(parents=True, exist_ok=True)
    keys.write_text(json.dumps({"redis_password": server.password}))
    return Address(run_id or f"t-{new_secret()[:12]}", server.url, f"file://{store}", None, str(keys))


def make_run(config: Config, address: Address) -> RunContext:
    """The run exists from here on: its flow is in Redis, its environment's description in the store."""
    from stagecoach.coordinator.lifecycle.preparation import create_flow  # it imports torch

    role = open_run_context(config, address)
    create_flow(role)
    role.checkpoints.store.put(ENVIRONMENT, json.dumps(describe_environment(config).as_dict()).encode())
    return role


@contextlib.contextmanager
def small_tmpfs(path: Path, size: str) -> Iterator[None]:
    """A file system in memory at `path`, as small as that of a container; skips the test where it cannot be mounted."""
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", path], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)


def in_memory(role: RunContext, memory: SharedMemory) -> RunContext:
    """The same role, with the fragments' bodies in shared memory."""
    return dataclasses.replace(role, bodies=Bodies({}, role.run_id, memory))


def shard_fields(role: RunContext, worker: str = "worker-0") -> set[str]:
    """The names of a worker's bodies on all shards of the run."""
    found: set[str] = set()
    for client in shard_clients(role.address, role.config).values():
        with client:
            names: Any = client.hkeys(RunKeys(role.run_id).bodies(worker))
            found |= {name.decode() for name in names}
    return found
