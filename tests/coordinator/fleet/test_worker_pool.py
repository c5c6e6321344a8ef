"""Where workers run, on a real cluster of three machines (raylets on this one)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from stagecoach.coordinator.fleet.capacity import autoscaler_limit, worker_capacity
from stagecoach.coordinator.fleet.worker_pool import Places
from stagecoach.coordinator.run_access.run import Run
from stagecoach.coordinator.services.embedded import new_secret
from stagecoach.coordinator.services.ray_internals import reread_settings
from stagecoach.shared.base.errors import UserError
from tests.conftest import minimal_config
from tests.support.processes.waiting import eventually
from tests.support.services import ray_head

pytestmark = [pytest.mark.timeout(240), pytest.mark.ray]
MEMORY = 80_000_000
SERVICES = {"ray": {"address": "auto"}, "redis": {"url": "redis://127.0.0.1/0"}, "store": {"url": "file:///tmp/none"}}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A head of 2 CPUs, and two machines of 4 on which a trainer may run."""
    # A process that has once asked for the token goes on doing so: without one, the cluster would not reach its driver.
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", os.environ.get("RAY_AUTH_TOKEN") or new_secret())
    reread_settings()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": MEMORY})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=4, resources={"learner": 1}, object_store_memory=MEMORY)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]


@ray.remote
class Anybody:
    """An actor that tells where it is."""

    @ray.method
    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()


def actors(role: str) -> dict[str, str]:
    """Live actors of a role: id → machine."""
    return {
        name: its.address.node_id.hex()
        for name, its in ray_head.actors().items()
        if its.repr_name.startswith(role) and its.state == its.ALIVE
    }


def place(count: int, **rollout: Any) -> list[str]:
    """Machines of `count` workers that are started together."""
    config = minimal_config(rollout={"fragment_steps": 8, "fragments_per_update": 2, "num_cpus": 1} | rollout)
    places = Places(config)
    made = [Anybody.options(**places.next()).remote() for _ in range(count)]  # type: ignore[attr-defined]
    nodes = ray.get([actor.node.remote() for actor in made])
    for actor in made:
        ray.kill(actor)
    eventually(lambda: ray.available_resources().get("CPU") == 10.0)  # type: ignore[no-untyped-call]
    return [str(node) for node in nodes]


def test_placement_spreads_packs_and_outlives_machine(cluster: Cluster, tmp_path: Path) -> None:
    spread = place(6)
    assert [spread.count(node) for node in set(spread)] == [2, 2, 2]
    packed = place(6, placement="pack")
    assert sorted(packed.count(node) for node in set(packed)) == [2, 4], "the small one is full, then another"

    sections: dict[str, Any] = {
        "runs_dir": str(tmp_path / "runs"), "trainer": {"resources": {"learner": 1}},
        "rollout": {"workers": 3, "num_cpus": 1, "fragment_steps": 8, "fragments_per_update": 2},
        "evaluation": {"episodes": 1, "num_cpus": 0}, "stop_at": {"updates": 10**6},
    }  # fmt: skip
    assert autoscaler_limit(minimal_config(**sections | SERVICES)) == 0
    worker_capacity(minimal_config(**sections), 3).refuse(1000, "", "")  # one more machine may come
    with pytest.raises(UserError, match="has room for 9"):
        worker_capacity(minimal_config(**sections), 2).refuse(1000, "", "")
    with pytest.raises(UserError, match="has room for 9"):
        Run.start(minimal_config(**sections | {"rollout": sections["rollout"] | {"workers": 10}}), "a")
    with ExitStack() as running:
        run = Run.start(minimal_config(**sections), "a")
        running.callback(run.wait, 60)
        running.callback(run.abandon)
        eventually(lambda: run.status().version > 2 and len(actors("worker-")) == 3, 120)
        (former,) = actors("trainer").values()
        lost = next(node for node in cluster.worker_nodes if node.node_id == former)
        version = run.status().version
        cluster.remove_node(lost, allow_graceful=False)
        eventually(lambda: set(actors("trainer").values()) - {former}, 120)
        eventually(lambda: run.status().version > version + 2, 120)
        eventually(lambda: run.status().scaling["capacity"].now == 5, 120)
        run.stop()
        outcome = run.wait(120)
        assert (outcome.reason, outcome.status.ledger["total"]["balances"]) == ("stopped", True)
    assert os.listdir(tmp_path / "runs") == ["a"]
