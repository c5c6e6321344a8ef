"""Where workers run, on a real cluster of three machines (raylets on this one)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from coordinator.capacity import Additions, room
from coordinator.placement import Places, worker_options
from coordinator.run import Run
from coordinator.services import new_secret
from shared.errors import UserError
from tests.conftest import minimal_config
from tests.support.speed import stretched

pytestmark = [pytest.mark.timeout(240), pytest.mark.ray]
MEMORY = 80_000_000


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A head of 2 CPUs, and two machines of 4 on which a trainer may stand."""
    # A process that has once asked for the token goes on doing so: without one, the cluster would not reach its driver.
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", os.environ.get("RAY_AUTH_TOKEN") or new_secret())
    raylet: Any = ray._raylet
    raylet.AuthenticationTokenLoader.instance().reset_cache()
    raylet.Config.initialize("")
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


def wait_for(done: Callable[[], Any]) -> Any:
    """What `done` answers, once that is something."""
    deadline = time.monotonic() + stretched(120)
    while not (found := done()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def actors(kind: str) -> dict[str, str]:
    """Live actors of a class: id → machine."""
    state: Any = ray._private.state
    return {
        name: actor["Address"]["NodeID"]
        for name, actor in state.actors().items()
        if actor["ActorClassName"] == kind and actor["State"] == "ALIVE"
    }


def place(count: int, **rollout: Any) -> list[str]:
    """The machines of so many workers, started in one go, with the first machine for the trainer."""
    config = minimal_config(rollout={"fragment_steps": 8, "fragments_per_update": 2, "num_cpus": 1} | rollout)
    places = Places(config, ray.get_runtime_context().get_node_id())
    made = [Anybody.options(**worker_options(config) | places.next()).remote() for _ in range(count)]  # type: ignore[attr-defined]
    nodes = ray.get([actor.node.remote() for actor in made])
    for actor in made:
        ray.kill(actor)
    wait_for(lambda: ray.available_resources().get("CPU") == 10.0)  # type: ignore[no-untyped-call]
    return [str(node) for node in nodes]


def test_workers_are_spread_packed_and_kept_off_a_machine_and_make_way_for_the_trainer(
    cluster: Cluster, tmp_path: Path
) -> None:
    head = ray.get_runtime_context().get_node_id()
    spread = place(6)
    assert [spread.count(node) for node in set(spread)] == [2, 2, 2]
    packed = place(6, placement="pack")
    assert sorted(packed.count(node) for node in set(packed)) == [2, 4], "the small one is full, then another"
    assert head not in place(8, avoid_trainer_node=True)
    assert head not in place(8, avoid_trainer_node=True, placement="pack")

    sections: dict[str, Any] = {
        "runs_dir": str(tmp_path / "runs"), "trainer": {"resources": {"learner": 1}},
        "rollout": {
            "workers": 3, "num_cpus": 1, "avoid_trainer_node": True, "fragment_steps": 8, "fragments_per_update": 2,
        },
        "evaluation": {"episodes": 1, "num_cpus": 0}, "stop_at": {"updates": 10**6},
    }  # fmt: skip
    assert room(minimal_config(**sections), Additions()).now == 6
    with pytest.raises(UserError, match="has room for 6"):
        Run.start(minimal_config(**sections | {"rollout": sections["rollout"] | {"workers": 7}}), "a")
    with ExitStack() as running:
        run = Run.start(minimal_config(**sections), "a")
        running.callback(run.wait, 60)
        running.callback(run.abandon)
        wait_for(lambda: run.status().version > 2 and len(actors("WorkerFace")) == 3)
        (former,) = actors("TrainerFace").values()
        assert former not in actors("WorkerFace").values()
        lost = next(node for node in cluster.worker_nodes if node.node_id == former)
        version = run.status().version
        cluster.remove_node(lost, allow_graceful=False)
        (now,) = wait_for(lambda: set(actors("TrainerFace").values()) - {former})
        wait_for(lambda: now not in actors("WorkerFace").values())
        wait_for(lambda: actors("WorkerFace") and set(actors("WorkerFace").values()) == {head})
        wait_for(lambda: run.status().version > version + 2)
        wait_for(lambda: run.status().scaling["room"]["now"] == 2)
        run.stop()
        outcome = run.wait(120)
        assert (outcome.reason, outcome.status.ledger["total"]["balances"]) == ("stopped", True)
    assert os.listdir(tmp_path / "runs") == ["a"]
