"""A cluster's life as its user types it on the laptop: `ray up`, train, watch, what is refused, `ray down`."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

import pytest

from stagecoach.coordinator.services.redis_servers import redis_binary
from tests.support.cluster.hosts import HOME, SOURCE, Network
from tests.support.cluster.observed_run import ObservedRun, write_config
from tests.support.cluster.ray_cluster import CLUSTER_FILE, RayCluster, until
from tests.support.cluster.services import BUCKET, PREFIX, Services
from tests.support.processes.command_line import check_ledger

RUN = "cartpole"
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def cluster(network: Network) -> RayCluster:
    """Head and two workers, which end soon after the head's Ray; Redis and the S3 server are the head's."""
    hosts, soon = network.hosts, {"RAY_gcs_rpc_server_reconnect_timeout_s": "10"}  # instead of a minute
    cluster = RayCluster(network, Services(hosts["head"]), [hosts["one"], hosts["two"]], environ=soon, min_workers=2)
    cluster.up(hosts["one"], hosts["two"])
    return cluster


def test_cartpole_is_solved_on_three_hosts(cluster: RayCluster) -> None:
    """Solved as CartPole-v0 is, at rates that stay: on a slow machine the evaluator sees few checkpoints, and may have
    seen too few when the example's rates reach zero."""
    solved = ("stop_at.mean_return=195", "stop_at.evaluations=1", "stop_at.env_steps=600000")
    rates = ("algorithm.learning_rate=0.001", "algorithm.clip_range=0.2")
    options = [word for value in ("rollout.workers=3", *solved, *rates) for word in ("--set", value)]
    cluster.train(RUN, SOURCE / "examples" / "cartpole.yaml", *options)
    run, seen = ObservedRun(cluster, RUN), set[tuple[str, str]]()

    def ended() -> bool:
        status = run.status()
        seen.update((beat.role, beat.address) for beat in status.roles)
        return status.state == "finished"

    watching = cluster.laptop.start("stagecoach", "watch", RUN, stdout=subprocess.PIPE)
    until("the end of the run", ended, lambda: seen)
    watched, _ = watching.communicate(timeout=60)
    hosts = {cluster.head.address, *(host.address for host in cluster.workers)}
    assert {address for _, address in seen} <= hosts
    assert len({address for role, address in seen if role == "worker"}) > 1
    assert re.search(r"^checkpoint +\d+_Step-\d+.ckpt", watched, re.MULTILINE), "as they land in the bucket"
    assert "finished" in watched and "balances" in watched


def test_bucket_holds_checkpoints_and_accounting(cluster: RayCluster) -> None:
    names, finished = cluster.services.names(RUN), cluster.services.marker(RUN, ".finished")
    assert finished["reason"] == "solved"
    check_ledger(finished)
    pointer = cluster.services.marker(RUN, ".checkpoint")
    assert pointer["final"] == finished["final"]
    whole = {name.split("/")[1] for name in names if name.endswith("/manifest.json")}
    assert {pointer["final"], pointer["best"]} <= whole


def test_laptop_has_the_whole_curve(cluster: RayCluster) -> None:
    """The run's folder is on none of the hosts where it trained: the rows are in the bucket alone."""
    counters = cluster.services.marker(RUN, ".finished")["counters"]["train"]
    place = (f"s3://{BUCKET}/{PREFIX}/{RUN}", "--endpoint-url", cluster.services.endpoint_url)
    for arguments in ((*place, "--runs-dir", "elsewhere"), (RUN,)):
        printed = cluster.stagecoach("metrics", *arguments, "--csv", "-").stdout
        rows = list(csv.DictReader(io.StringIO(printed)))
        assert [int(float(row["train/updates"])) for row in rows] == list(range(1, counters["updates"] + 1))
        assert float(rows[-1]["time/env_steps"]) == counters["env_steps"]
    scores = cluster.stagecoach("metrics", RUN, "--stream", "evaluations", "--jsonl", "-").stdout.splitlines()
    assert {"checkpoint", "eval/ep_rew_mean"} <= json.loads(scores[-1]).keys()
    assert json.loads(cluster.stagecoach("status", RUN, "--json").stdout)["metrics"]["rollout/ep_rew_mean"] > 50


def test_missing_package_of_a_host_is_named(cluster: RayCluster) -> None:
    url = "redis://127.0.0.1:6390/0"  # the laptop's own: from there it is reached, from the cluster it is not
    redis = [redis_binary(), "--port", "6390", "--bind", "127.0.0.1", "--save", "", "--protected-mode", "no"]
    process = cluster.laptop.start(*redis)
    no_user = {name: "" for name in cluster.services.environ if name.endswith("_REDIS_PASSWORD")}
    said = refused(cluster, environ={"STAGECOACH__REDIS__URL": url, **no_user})
    assert "127.0.0.1:6390 does not answer" in said and "on the cluster" in said
    process.kill()
    process.wait()

    packages = next(cluster.workers[1].path(HOME / "stagecoach-venv").glob("lib/python*/site-packages"))
    other = packages / "torch-0.1.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 0.1\n")
    said = refused(cluster)
    shutil.rmtree(other)
    assert f"the machine {cluster.workers[1].address} has other versions" in said and "torch 0.1" in said


def test_workers_beyond_capacity_are_refused_with_the_limit(cluster: RayCluster) -> None:
    said = refused(cluster, "--set", "rollout.workers=100")
    assert "100 workers" in said and "has room for 9" in said, said


def test_ray_down_leaves_nothing_running(cluster: RayCluster) -> None:
    cluster.launcher("exec", "bash ~/stagecoach/deploy/services.sh stop")
    cluster.launcher("down", "-y")
    hosts = [cluster.head, *cluster.workers]

    def left() -> list[str]:
        return [line for host in hosts for line in host.processes().values()]

    until("an end of all processes", lambda: not left(), left, seconds=250)


def refused(cluster: RayCluster, *arguments: str, environ: Mapping[str, Any] | None = None) -> str:
    """Returns the message of a refused run: one line, exit code 2, and no trace of it."""
    options = ("--address", CLUSTER_FILE, "--run-id", "refused", "--detach")
    config = str(write_config(cluster))
    done = cluster.stagecoach("train", config, *options, *arguments, environ=environ, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done
    assert done.stderr.startswith("Error: "), done
    assert cluster.services.names("refused") == set()
    return done.stderr
