"""One run that loses the machines of its cluster, one after the other, and goes on; at its end all is accounted for,
and training again over its log gives the same weights. The tests stand in the order of its life.
"""

from __future__ import annotations

import json
import time

import pytest

from stagecoach.shared.protocol.heartbeat import Beat
from tests.support.cluster.hosts import Host, Network
from tests.support.cluster.observed_run import ObservedRun, write_config
from tests.support.cluster.ray_cluster import RayCluster
from tests.support.cluster.services import Services
from tests.support.processes.command_line import check_ledger

RUN = "losses"
_CUT_SECONDS = 20.0
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def cluster(network: Network) -> RayCluster:
    """A head without roles, two workers, each of which has room for all; Redis and the store on a fourth host."""
    hosts = network.hosts
    services = Services(hosts["services"])
    services.start()
    cluster = RayCluster(network, services, [hosts["one"], hosts["two"]], cpus=(0, 5), min_workers=2)
    cluster.up(hosts["one"], hosts["two"])
    return cluster


@pytest.fixture(scope="module")
def run(cluster: RayCluster) -> ObservedRun:
    """Starts an endless run of two workers."""
    cluster.train(RUN, write_config(cluster))
    run = ObservedRun(cluster, RUN)
    run.until_workers(2)
    return run


def test_cluster_run_scales_from_2_to_6_to_1(cluster: RayCluster, run: ObservedRun) -> None:
    before = run.until_it_goes_on()
    cluster.stagecoach("scale", RUN, "6")
    six = {f"worker-{index}" for index in range(6)}
    at_work = run.until(
        "six workers that are learned from", lambda status: six <= run.beats().keys() and six <= status.ledger.keys()
    )
    assert {beat.address for beat in at_work.roles if beat.role == "worker"} == {
        host.address for host in cluster.workers
    }
    cluster.stagecoach("scale", RUN, "1")
    run.until_workers(1)
    after = run.until_it_goes_on()
    assert pid(before.roles, "trainer") == pid(after.roles, "trainer"), "nothing restarts"
    assert all(line["balances"] for line in after.ledger.values())
    cluster.stagecoach("scale", RUN, "2")
    run.until_workers(2)


def test_dead_host_is_replaced_and_used_again(cluster: RayCluster, run: ObservedRun) -> None:
    trainers = run.host_of("trainer")
    victim = next(host for host in cluster.workers if host is not trainers)
    lose(cluster, run, victim, trainers)
    assert run.epoch() == 1, "the trainer was not there, and goes on"
    work_on(cluster, run, victim)
    cluster.stagecoach("scale", RUN, "2")


def test_trainer_moves_when_its_host_dies(cluster: RayCluster, run: ObservedRun) -> None:
    victim = run.host_of("trainer")
    other = next(host for host in cluster.workers if host is not victim)
    lose(cluster, run, victim, other)
    assert run.epoch() == 2


@pytest.mark.parametrize("whose", ["a worker", "the trainer"])
def test_isolated_host_returns(cluster: RayCluster, run: ObservedRun, whose: str) -> None:
    trainers, epoch = run.host_of("trainer"), run.epoch()
    victim = trainers if whose == "the trainer" else next(host for host in cluster.workers if host is not trainers)
    work_on(cluster, run, victim)
    victim.cut()
    time.sleep(_CUT_SECONDS)
    forked = [line for line in victim.processes().values() if "zygote_server" in line]
    assert len(forked) >= 2, "both sides are alive: the zygote and its role"
    victim.heal()
    cluster.wait_for_nodes(*cluster.workers)
    run.until_it_goes_on()
    assert run.epoch() == epoch + (whose == "the trainer")
    cluster.stagecoach("scale", RUN, "2")
    run.until_workers(2)
    assert all(line["balances"] for line in run.status().ledger.values())
    assert run.given_up() == []


def test_ledger_balances_at_the_end_of_the_cluster_run(cluster: RayCluster, run: ObservedRun) -> None:
    cluster.stagecoach("stop", RUN)
    finished = cluster.services.marker(RUN, ".finished")
    assert finished["reason"] == "stopped"
    check_ledger(finished)
    epochs = [epoch for _, epoch in run.epochs()]
    assert epochs == sorted(epochs) and set(epochs) == {1, 2, 3}, "no trainer has written after its successor"
    assert cluster.services.marker(RUN, ".checkpoint")["epoch"] == 3


def test_replay_of_the_cluster_run_gives_equal_weights(cluster: RayCluster, run: ObservedRun) -> None:
    replayed = json.loads(cluster.stagecoach("replay", RUN, "--from", "start", "--to", "final", "--json").stdout)
    assert replayed["equal"], replayed


def lose(cluster: RayCluster, run: ObservedRun, victim: Host, other: Host) -> None:
    """Power goes, all of its roles go on on the other host, power comes back, and so does the node."""
    victim.power_off()
    roles = {"trainer", "evaluator", "worker-0", "worker-1"}
    run.until("all roles elsewhere", lambda _: roles <= run.beats().keys() and addresses(run) == {other.address})
    status = run.until_it_goes_on()
    assert all(line["balances"] for line in status.ledger.values())
    victim.boot()
    cluster.wait_for_nodes(*cluster.workers)


def work_on(cluster: RayCluster, run: ObservedRun, host: Host) -> None:
    """Waits until a worker is on this host. Ray may not know yet that it is there when the first ones are placed."""
    while host.address not in addresses(run, "worker"):
        for workers in (2, 4):
            cluster.stagecoach("scale", RUN, str(workers))
            run.until_workers(workers)


def addresses(run: ObservedRun, role: str | None = None) -> set[str]:
    """Hosts of the living roles, or of one kind; the coordinator is on the head."""
    beats = run.beats().values()
    return {beat.address for beat in beats if beat.role == role or (role is None and beat.role != "coordinator")}


def pid(beats: list[Beat], role: str) -> int:
    """Process id of a role."""
    return next(beat.pid for beat in beats if beat.id == role)
