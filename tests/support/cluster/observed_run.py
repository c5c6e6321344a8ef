"""A run on the cluster as whoever reaches Redis and the store sees it, and the environment of its user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from stagecoach.coordinator.catalog.run_files import RunStatus
from stagecoach.coordinator.catalog.status import Status, live_status
from stagecoach.shared.base.errors import RunNotFound
from stagecoach.shared.protocol.events import read_events
from stagecoach.shared.protocol.flow_control import Flow
from stagecoach.shared.protocol.heartbeat import Beat
from tests.support.cluster.hosts import HOME, Host
from tests.support.cluster.ray_cluster import RayCluster, until
from tests.support.runs import lockstep_run


def write_config(cluster: RayCluster, **sections: Any) -> Path:
    """A folder on the laptop with a config for CartPole and the module that it names; no other host has it."""
    folder = cluster.laptop.path(HOME / "work")
    folder.mkdir(exist_ok=True)
    (folder / "slow.py").write_text(lockstep_run.ENVIRONMENT)
    wrappers = [{"path": "slow:Slow", "kwargs": {"seconds": 0.003}}]
    data: dict[str, Any] = {
        "environment": {"id": "CartPole-v1", "num_envs": 4, "wrappers": wrappers},
        "rollout": {"workers": 2, "fragment_steps": 16, "fragments_per_update": 4, "max_policy_lag": 1},
        "algorithm": {"minibatch_size": 64, "epochs": 2},
        "checkpoint": {"every": "20 updates", "keep_last": 1000},
        "evaluation": {"episodes": 1},
        "archive": "all",
        "stop_at": {"env_steps": 10**9},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(data | sections))
    return HOME / "work" / "config.yaml"


class ObservedRun:
    """One run; nothing here changes it."""

    def __init__(self, cluster: RayCluster, run_id: str) -> None:
        self.run_id = run_id
        self._cluster = cluster

    def status(self) -> Status:
        """Reads the status from Redis, with the accounting."""
        with self._cluster.services.redis() as client:
            try:
                return live_status(client, self.run_id)
            except RunNotFound:
                return Status(self.run_id, RunStatus.UNKNOWN, bottleneck="")

    def epoch(self) -> int:
        """Epoch of the trainer that may write."""
        with self._cluster.services.redis() as client:
            return Flow(client, self.run_id).read().epoch

    def beats(self) -> dict[str, Beat]:
        """The last heartbeat of each role that is alive, by its id."""
        return {beat.id: beat for beat in self.status().roles if beat.alive}

    def host_of(self, role: str) -> Host:
        """Host of a role at its last heartbeat."""
        address = next(beat.address for beat in self.status().roles if beat.id == role)
        return next(host for host in self._cluster.workers if host.address == address)

    def until(self, what: str, done: Any) -> Status:
        """The first status that is as wanted; `done` is asked again and again."""
        found: list[Status] = []

        def look() -> bool:
            found[:] = [self.status()]
            return bool(done(found[0]))

        until(what, look, lambda: f"{found}; {self._cluster.log()}")
        return found[0]

    def until_it_goes_on(self) -> Status:
        """Waits for twenty more versions."""
        goal = self.status().version + 20
        return self.until(f"version {goal}", lambda status: status.version >= goal)

    def until_workers(self, count: int) -> None:
        names = {f"worker-{index}" for index in range(count)}
        self.until(
            f"{count} workers",
            lambda status: {beat.id for beat in status.roles if beat.role == "worker" and beat.alive} == names,
        )

    def given_up(self) -> list[str]:
        """Events of the fleet about roles that it does not restart."""
        with self._cluster.services.redis() as client:
            return [event.text for event in read_events(client, self.run_id) if "given up" in event.text]

    def epochs(self) -> list[tuple[int, int]]:
        """Version and epoch of each kept checkpoint, in the order of versions."""
        services = self._cluster.services
        names = [name for name in services.names(self.run_id) if name.endswith("/manifest.json")]
        manifests = [services.marker(self.run_id, name) for name in names]
        return sorted((manifest["version"], manifest["epoch"]) for manifest in manifests)
