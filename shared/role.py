"""What every role starts from: its config, its address, and the connections made from them.

The config comes from whoever starts the role (Ray's control plane, or a file named on the command line), never from
Redis or the store, because it names code to import. Its hash must be the run's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import redis

from shared.archive import Archive
from shared.bodies import Bodies
from shared.checkpoint import ENVIRONMENT, CheckpointStore
from shared.config import Config
from shared.connection import Address, RoleName, connect_redis, shard_clients
from shared.errors import CheckpointDamaged, ConfigError, ObjectMissing, RunNotFound
from shared.experience_log import ExperienceLog
from shared.flow import Flow
from shared.object_store import open_store
from shared.spaces import EnvironmentDescription


@dataclass(frozen=True)
class Role:
    """Config, address and open connections of one process (or thread) of a run."""

    config: Config
    address: Address
    redis: redis.Redis
    checkpoints: CheckpointStore
    flow: Flow
    bodies: Bodies
    """The fragments' bodies on `redis.shards`; who asks for none connects to none."""

    def log(self) -> ExperienceLog:
        """The run's experience log."""
        return ExperienceLog(self.redis, self.run_id, self.bodies)

    def archive(self) -> Archive:
        """The run's archived log."""
        return Archive(self.checkpoints.store, self.run_id)

    @property
    def run_id(self) -> str:
        """The run."""
        return self.address.run_id

    def description(self) -> EnvironmentDescription:
        """See `read_description`."""
        return read_description(self.checkpoints)

    def check_config(self, shards_may_change: bool = False) -> None:
        """Raises `ConfigError` where this role's config is not the one that the run was started with."""
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


def read_description(checkpoints: CheckpointStore) -> EnvironmentDescription:
    """Agents and spaces of a run as they were recorded when it was made.

    Raises `RunNotFound`, `CheckpointDamaged`, or what the store raises while it is away (see `insist`).
    """
    try:
        return EnvironmentDescription.from_dict(checkpoints.read_whole(ENVIRONMENT, json.loads))
    except ObjectMissing:
        raise RunNotFound(f"the store has no run {checkpoints.run_id!r} ({ENVIRONMENT} is missing)") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointDamaged(
            f"{ENVIRONMENT} of run {checkpoints.run_id} is not what was written there "
            f"({type(error).__name__}: {error}); bring it back, or start a new run"
        ) from None


def open_role(config: Config, address: Address, name: RoleName | None = None) -> Role:
    """Connects to Redis, with the credentials of the role of this name, and names the store.

    Raises `RedisUnavailable` or `ConfigError`.
    """
    client = connect_redis(address, config, name)
    checkpoints = CheckpointStore(open_store(address, config), address.run_id)
    bodies = Bodies(shard_clients(address, config, name), address.run_id)
    return Role(config, address, client, checkpoints, Flow(client, address.run_id), bodies)
