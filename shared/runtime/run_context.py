"""The run context of a process: the run's config and address, and its connections.

The config never comes from Redis or the store, because it names code to import. Its hash must be the run's.
"""

from dataclasses import dataclass
from typing import Any

import redis

from stagecoach.shared.base.address import Address, RoleName
from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.spaces import EnvironmentDescription
from stagecoach.shared.protocol.events import emit
from stagecoach.shared.protocol.experience_log import ExperienceLog
from stagecoach.shared.protocol.flow_control import Flow
from stagecoach.shared.protocol.payload_shards import Bodies
from stagecoach.shared.protocol.redis_client import connect_redis, shard_clients
from stagecoach.shared.protocol.shared_memory import SharedMemory
from stagecoach.shared.storage.checkpoint_store import CheckpointStore
from stagecoach.shared.storage.log_archive import Archive
from stagecoach.shared.storage.object_store import open_store


@dataclass(frozen=True)
class RunContext:
    """Config, address and open connections of one process (or thread) of a run."""

    config: Config
    address: Address
    redis: redis.Redis
    checkpoints: CheckpointStore
    flow: Flow
    bodies: Bodies
    """The fragments' bodies in shared memory or on `redis.shards`, which connect on first use."""

    def log(self) -> ExperienceLog:
        return ExperienceLog(self.redis, self.run_id, self.bodies)

    def archive(self) -> Archive:
        return Archive(self.checkpoints.store, self.run_id)

    @property
    def run_id(self) -> str:
        return self.address.run_id

    def emit_event(self, kind: str, text: str, **data: Any) -> None:
        """Writes an event."""
        emit(self.redis, self.run_id, kind, text, **data)

    def description(self) -> EnvironmentDescription:
        return self.checkpoints.description()

    def check_config(self, shards_may_change: bool = False) -> None:
        """Raises `ConfigError` if this process's config is not the one that the run was started with."""
        flow = self.flow.read()
        if flow.config_hash != self.config.hash():
            raise ConfigError(
                f"this role's config has the hash {self.config.hash()[:12]}, run {self.run_id} was started with "
                f"{flow.config_hash[:12]}; start the role with the run's own config.yaml"
            )
        mine, theirs = (", ".join(names) or "none" for names in (self.bodies.names, flow.shards))
        if mine != theirs and not shards_may_change:
            raise ConfigError(
                f"this role's redis.shards are {mine}, those of run {self.run_id} are {theirs}; start the role with "
                f"the run's own config.yaml"
            )


def open_run_context(config: Config, address: Address, name: RoleName | None = None) -> RunContext:
    """Connects to Redis as the role of this name, and names the store; raises `RedisUnavailable` or `ConfigError`."""
    client = connect_redis(address, config, name)
    checkpoints = CheckpointStore(open_store(address, config), address.run_id)
    bodies = Bodies(shard_clients(address, config, name), address.run_id, SharedMemory.of(address))
    return RunContext(config, address, client, checkpoints, Flow(client, address.run_id), bodies)
