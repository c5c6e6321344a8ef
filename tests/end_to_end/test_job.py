"""Runs on a cluster from a laptop: `train --address`, commands that follow a run, and refusals in one line."""

from __future__ import annotations

import functools
import http.server
import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stagecoach.coordinator.services.embedded import new_secret
from tests.support.processes.command_line import CommandLine, OwnServers, check_ledger, check_refused, own_servers
from tests.support.runs.lockstep_run import ENVIRONMENT
from tests.support.services.ray_head import DashboardHead

pytestmark = pytest.mark.timeout(240)


@dataclass(frozen=True)
class Cluster(OwnServers):
    """Cluster of one machine next to Redis and S3; `environ` holds the secrets of the machine and the submitter."""

    head: DashboardHead

    @property
    def dashboard(self) -> str:
        """URL to which jobs are submitted."""
        return f"http://{self.head.dashboard}"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with own_servers(tmp_path_factory.mktemp("cluster")) as servers:
        token = new_secret() + new_secret()
        access = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0"}
        environ = servers.environ | access
        head = DashboardHead(8, token, environ)
        yield Cluster(servers.redis, servers.s3, servers.folder, environ, head)
        head.stop()


@pytest.fixture
def laptop(terminal: CommandLine, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """A terminal that knows the cluster's secrets, with a wrapper of its own in its folder."""
    terminal.environ.update(cluster.environ)
    for name, value in cluster.environ.items():
        monkeypatch.setenv(name, value)
    (terminal.folder / "slow.py").write_text(ENVIRONMENT)
    return terminal


def write_config(laptop: CommandLine, cluster: Cluster, **sections: object) -> Path:
    slow = {"path": "slow:Slow", "kwargs": {"seconds": 0.001}}  # or a short run is over before somebody looks
    environment = {"id": "CartPole-v1", "num_envs": 4, "wrappers": [slow]}
    return laptop.write_config(**({"environment": environment} | cluster.config | sections))


def finished(cluster: Cluster, run_id: str) -> Any:
    return json.loads((cluster.folder / "s3" / "stagecoach" / run_id / ".finished").read_text())


def test_submitted_run_is_followed_scaled_and_stopped(laptop: CommandLine, cluster: Cluster) -> None:
    config = write_config(laptop, cluster, stop_at={"updates": 100_000})
    begun = laptop.run("train", config, "--address", cluster.dashboard, "--run-id", "far", "--detach")
    assert "run far is live on the cluster" in begun.ok() and begun.err == ""
    laptop.until("far", "training", lambda status: status.live and status.version > 3)
    laptop.run("scale", "far", "3").ok()
    laptop.until("far", "three workers", lambda status: len([b for b in status.roles if b.role == "worker"]) == 3)
    place = ("s3://stagecoach/far", "--endpoint-url", cluster.config["store"]["endpoint_url"], "--runs-dir", "others")
    watching = laptop.start("watch", *place)
    laptop.wait_until("a checkpoint that lands", lambda: "checkpoint  " in laptop.output(watching))
    assert laptop.run("stop", "far").ok().strip() == "far: stopped"
    laptop.ended(watching).ok()
    check_ledger(finished(cluster, "far"))
    written = (laptop.folder / "runs" / "far" / "remote.json").read_text()
    assert [name for name, value in cluster.environ.items() if len(value) > 5 and value in written] == []


def test_attach_replaces_a_dead_coordinator_without_loss(laptop: CommandLine, cluster: Cluster) -> None:
    config = write_config(laptop, cluster, stop_at={"updates": 150})
    laptop.run("train", config, "--address", cluster.dashboard, "--run-id", "dies", "--detach").ok()
    status = laptop.until("dies", "training", lambda status: status.live and status.version > 3)
    coordinator = next(beat for beat in status.roles if beat.role == "coordinator")
    os.kill(coordinator.pid, signal.SIGKILL)
    laptop.until("dies", "that it is interrupted", lambda status: status.state == "interrupted")
    assert "reached stop_at" in laptop.run("attach", "dies").ok()
    check_ledger(finished(cluster, "dies"))
    assert "finished: reached stop_at" in laptop.run("attach", "dies").ok()


def goal(cluster: Cluster, run_id: str, more: int) -> str:
    return f"stop_at.updates={finished(cluster, run_id)['version'] + more}"


@pytest.mark.timeout(900)
def test_submitted_run_continues_from_its_folder_in_every_state(laptop: CommandLine, cluster: Cluster) -> None:
    config = write_config(laptop, cluster, stop_at={"updates": 100_000})
    submit = ("train", config, "--address", cluster.dashboard, "--run-id")
    laptop.run(*submit, "on", "--detach").ok()
    laptop.until("on", "training", lambda status: status.live and status.version > 3)
    check_refused(laptop.run("resume", "on"), "is live already", "`stagecoach attach on`")
    check_refused(laptop.run(*submit, "on", "--or-resume"), "is live already", "`stagecoach attach on`")
    check_refused(laptop.run(*submit, "on"), "stagecoach resume on")
    laptop.run("stop", "on").ok()

    assert "`stagecoach resume on` continues it" in laptop.run("attach", "on").ok()
    laptop.run("resume", "on", "--set", goal(cluster, "on", 20)).ok()
    assert finished(cluster, "on")["reason"] == "exhausted"

    check_refused(laptop.run("resume", "on"), "would end at once", "continue it with --set stop_at.updates=")
    first = laptop.handle("on").checkpoints()[0]["name"]
    laptop.run("resume", "on", "--from", first, "--set", goal(cluster, "on", 10)).ok()
    assert f"as resume --from {first} asked" in laptop.run("metrics", "on", "--stream", "events", "--jsonl", "-").ok()

    laptop.run("resume", "on", "--set", "stop_at.updates=100000", "--detach").ok()
    before = laptop.handle("on").status().version
    beats = laptop.until("on", "training", lambda status: status.live and status.version > before).roles
    os.kill(next(beat.pid for beat in beats if beat.role == "coordinator"), signal.SIGKILL)
    laptop.until("on", "that it is interrupted", lambda status: status.state == "interrupted")
    laptop.run("resume", "on", "--set", f"stop_at.updates={before + 2000}", "--detach").ok()
    laptop.until("on", "training", lambda status: status.live)
    laptop.run("stop", "on").ok()
    assert finished(cluster, "on")["ledger"]["total"]["balances"]

    laptop.run(*submit, "child", "--initialize-from", "on", "--set", "stop_at.updates=2").ok()
    assert finished(cluster, "child")["reason"] == "exhausted"


@pytest.mark.timeout(600)
def test_linked_run_names_the_command_that_continues_it(laptop: CommandLine, cluster: Cluster) -> None:
    config = write_config(laptop, cluster, stop_at={"updates": 5})
    submit = ("train", config, "--address", cluster.dashboard, "--run-id", "linked")
    laptop.run(*submit).ok()
    laptop.environ["STAGECOACH__RUNS_DIR"] = "others"
    place = ("s3://stagecoach/linked", "--endpoint-url", cluster.config["store"]["endpoint_url"])
    said = "stagecoach train CONFIG --address URL --run-id linked --or-resume"
    assert said in laptop.run("attach", *place, "--runs-dir", "others").ok()
    check_refused(laptop.run("resume", "linked", "--runs-dir", "others"), said)
    first = laptop.handle("linked").checkpoints()[0]["name"]
    laptop.run(*submit, "--or-resume", "--from", first, "--set", "stop_at.updates=9").ok()
    assert finished(cluster, "linked")["counters"]["train"]["updates"] == 9
    laptop.run("resume", "linked", "--runs-dir", "others", "--set", "stop_at.updates=12").ok()
    assert finished(cluster, "linked")["counters"]["train"]["updates"] == 12


def test_ctrl_c_ends_a_followed_run_with_a_last_checkpoint(laptop: CommandLine, cluster: Cluster) -> None:
    config = write_config(laptop, cluster, stop_at={"updates": 100_000})
    following = laptop.start("train", config, "--address", cluster.dashboard, "--run-id", "followed")
    laptop.wait_until("an update", lambda: "env steps" in laptop.output(following))
    following.send_signal(signal.SIGINT)
    assert "followed: stopped" in laptop.ended(following).ok()
    assert finished(cluster, "followed")["final"]


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"store": {"url": "s3://nowhere"}}, "the bucket 'nowhere' does not exist"),
        ({"rollout": {"workers": 2, "num_cpus": 400}}, "400"),
    ],
)
def test_refusal_of_the_cluster_is_one_line_and_leaves_nothing(
    laptop: CommandLine, cluster: Cluster, sections: dict[str, dict[str, str]], said: str
) -> None:
    merged = {name: cluster.config.get(name, {}) | content for name, content in sections.items()}
    config = write_config(laptop, cluster, **merged)
    refused = laptop.run("train", config, "--address", cluster.dashboard, "--run-id", "refused", "--detach")
    check_refused(refused, "Error: on the cluster: ", said)
    assert not (laptop.folder / "runs" / "refused").exists()
    assert not (cluster.folder / "s3" / "stagecoach" / "refused").exists()


def test_missing_or_wrong_cluster_is_named(laptop: CommandLine, cluster: Cluster) -> None:
    config = write_config(laptop, cluster)

    def check(said: str, address: str, *more: str) -> None:
        check_refused(laptop.run("train", config, "--address", address, *more), said)

    check("nothing answers at http://127.0.0.1:9", "http://127.0.0.1:9")
    check("expected Ray's dashboard", "127.0.0.1:6379")
    check("expected Ray's dashboard", "no-such-cluster.yaml")
    check("is not Ray's dashboard", cluster.config["store"]["endpoint_url"])
    (laptop.folder / "empty").mkdir()
    check("would not be sent", cluster.dashboard, "--working-dir", str(laptop.folder / "empty"))
    (laptop.folder / "data.bin").write_bytes(bytes(100 << 20))
    check("move the config (and the modules it needs) to a separate folder", cluster.dashboard)
    (laptop.folder / "data.bin").unlink()
    laptop.environ["RAY_AUTH_TOKEN"] = "0" * 64
    check("refuses the token", cluster.dashboard)
    from stagecoach.coordinator.lifecycle.doctor import open_ray  # which imports torch

    assert open_ray(cluster.head.address, cluster.head.dashboard) == [], "strangers are kept out, as `doctor` finds"


def test_another_ray_is_refused_with_both_versions(laptop: CommandLine, cluster: Cluster, tmp_path: Path) -> None:
    """Imitates the dashboard of another Ray: two Rays of different versions cannot be installed beside each other."""
    (tmp_path / "api").mkdir()
    (tmp_path / "api" / "version").write_text('{"version": "4", "ray_version": "2.49.0", "ray_commit": "x"}')
    answers = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        config = write_config(laptop, cluster)
        done = laptop.run("train", config, "--address", f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    check_refused(done, "and 2.49.0 at http://127.0.0.1")
