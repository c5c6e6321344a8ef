"""A run on a cluster that `ray up` has launched from the laptop: trained on three hosts, gone with `ray down`."""

from __future__ import annotations

import subprocess

import pytest

from shared.heartbeat import Beat, read_heartbeats
from tests.cluster.hosts import SOURCE, Network
from tests.cluster.ray_cluster import RayCluster, until
from tests.cluster.services import Services
from tests.end_to_end.command_line import check_ledger

RUN = "cartpole"
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def cluster(network: Network) -> RayCluster:
    """Head and two workers; Redis and the S3 server are the head's."""
    hosts = network.hosts
    cluster = RayCluster(network, Services(hosts["head"]), [hosts["one"], hosts["two"]], min_workers=2)
    cluster.up()
    cluster.wait_for_nodes(hosts["one"], hosts["two"])
    return cluster


def test_cartpole_is_solved_on_three_hosts(cluster: RayCluster) -> None:
    training = cluster.head.start(
        "bash", "-c",
        f"set -a; . ~/stagecoach.env; set +a; stagecoach train {SOURCE}/examples/cartpole.yaml --run-id {RUN} "
        "--set ray.address=auto --set rollout.workers=3",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    seen: set[tuple[str, str]] = set()

    def ended() -> bool:
        seen.update((beat.role, beat.address) for beat in heartbeats(cluster, RUN))
        return training.poll() is not None

    until("the end of the run", ended, lambda: seen)
    out, _ = training.communicate()
    assert training.returncode == 0, out
    assert "solved" in out
    hosts = {cluster.head.address, *(host.address for host in cluster.workers)}
    assert {role for role, _ in seen} == {"coordinator", "trainer", "evaluator", "worker"}
    assert {address for _, address in seen} <= hosts
    assert len({address for role, address in seen if role == "worker"}) > 1


def test_its_checkpoints_and_books_are_in_the_bucket(cluster: RayCluster) -> None:
    names, finished = cluster.services.names(RUN), cluster.services.marker(RUN, ".finished")
    assert finished["reason"] == "solved"
    check_ledger(finished)
    pointer = cluster.services.marker(RUN, ".checkpoint")
    assert pointer["final"] == finished["final"]
    assert f"checkpoints/{pointer['final']}/manifest.json" in names
    assert f"checkpoints/{pointer['best']}/manifest.json" in names


def heartbeats(cluster: RayCluster, run_id: str) -> list[Beat]:
    """The last heartbeat of each role, as it stands in Redis; none while there is no Redis yet."""
    with cluster.services.redis() as client:
        return read_heartbeats(client, run_id)
