"""Machines that come when workers need them and go when nobody does: deploy/local.yaml as it is, with min_workers 0."""

from __future__ import annotations

import pytest

from tests.support.cluster.hosts import Network
from tests.support.cluster.observed_run import ObservedRun, write_config
from tests.support.cluster.ray_cluster import RayCluster, until
from tests.support.cluster.services import Services

RUN = "need"
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def cluster(network: Network) -> RayCluster:
    """The head alone, which has room for a trainer, an evaluator and one worker."""
    hosts = network.hosts
    workers = [hosts["one"], hosts["two"]]
    cluster = RayCluster(network, Services(hosts["head"]), workers, idle_timeout_minutes=0.1)
    cluster.up()
    return cluster


def test_host_starts_with_workers_and_stops_when_idle(cluster: RayCluster) -> None:
    cluster.train(RUN, write_config(cluster, archive="off"), "--set", "rollout.workers=1")
    run = ObservedRun(cluster, RUN)
    run.until("the worker", lambda status: "worker-0" in run.beats())
    assert cluster.nodes() == {cluster.head.address}

    cluster.stagecoach("scale", RUN, "3")
    three = {"worker-0", "worker-1", "worker-2"}
    grown = run.until("three workers", lambda status: three <= {beat.id for beat in status.roles if beat.alive})
    added = {beat.address for beat in grown.roles if beat.role == "worker"} - {cluster.head.address}
    assert added and added <= {host.address for host in cluster.workers}
    until("the host in Ray's view", lambda: added < cluster.nodes(), cluster.log)
    run.until("all three learned from", lambda status: three <= status.ledger.keys())

    cluster.stagecoach("scale", RUN, "1")
    until("the head alone", lambda: cluster.nodes() == {cluster.head.address}, cluster.log)
    status = run.until_it_goes_on()
    assert run.epoch() == 1 and all(line["balances"] for line in status.ledger.values())
    cluster.stagecoach("stop", RUN)
