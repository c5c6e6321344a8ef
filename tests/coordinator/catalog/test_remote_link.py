"""Runs whose coordinator is on another machine, seen from here: real Redis and S3, the coordinator's beat by hand."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from stagecoach.coordinator.catalog.fixed_players import find_player
from stagecoach.coordinator.catalog.run_folder import RemoteLink, Submission, read_remote
from stagecoach.coordinator.lifecycle import run_lease
from stagecoach.coordinator.lifecycle.launcher import first_policies
from stagecoach.coordinator.lifecycle.ray_job import JobServer
from stagecoach.coordinator.lifecycle.run_lease import RunLease
from stagecoach.coordinator.run_access.run import Run
from stagecoach.rollout_worker.environments.description import describe_environment
from stagecoach.shared.base.address import Address
from stagecoach.shared.base.errors import RedisUnavailable, RunNotFound, StoreUnavailable, UserError
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.protocol.heartbeat import Wait, poll
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.runtime.run_context import open_run_context
from tests.conftest import RedisServer, minimal_config
from tests.support.processes.command_line import Stagecoach, check_refused
from tests.support.processes.waiting import eventually
from tests.support.suite.groups import some_quick
from tests.support.suite.speed import stretched


@pytest.fixture
def far(servers: tuple[str, str], tmp_path: Path, unique_run_id: str) -> Run:
    """A run that has trained and ended on another machine (another folder of runs)."""
    run = Run.start(_config(tmp_path / "there", servers), unique_run_id, inline=True, or_resume=True)
    assert run.wait(60).reason == "exhausted"
    return run


@pytest.fixture
def here(far: Run, servers: tuple[str, str], tmp_path: Path) -> Run:
    """The same run, of which this machine has only a link."""
    return Run.attach(f"s3://stagecoach/{far.run_id}", tmp_path / "here", endpoint_url=servers[1])


def _config(runs: Path, servers: tuple[str, str], **sections: Any) -> Config:
    common = {
        "runs_dir": str(runs), "rollout": {"workers": 1, "fragment_steps": 8, "fragments_per_update": 1},
        "evaluation": {"episodes": 1}, "stop_at": {"updates": 2}, "redis": {"url": servers[0]},
        "store": {"url": "s3://stagecoach", "endpoint_url": servers[1]},
    }  # fmt: skip
    return minimal_config(**common | sections)


def test_run_in_a_bucket_is_played_and_begun_from(
    far: Run, servers: tuple[str, str], tmp_path: Path, stagecoach: Stagecoach
) -> None:
    """By its place in the bucket: played, listed, the beginning of another run, and a fixed player of a league."""
    place, name = f"s3://stagecoach/{far.run_id}", far.checkpoint_store().resolve("final")
    at = "--endpoint-url", servers[1]
    assert stagecoach("evaluate", place, "--json", *at).json()["checkpoint"] == far.checkpoint_store().preferred()
    for target in (f"{place}/final", f"{place}/{name}", f"{place}/checkpoints/{name}"):
        assert stagecoach("evaluate", target, "--json", *at).json()["checkpoint"] == name
    check_refused(stagecoach("evaluate", f"{place}-not", *at), "config.yaml is missing there")
    check_refused(stagecoach("evaluate", f"{place}/9_Step-9.ckpt", *at), "no checkpoint '9_Step-9.ckpt'", name)
    assert name in stagecoach("checkpoints", "list", place, *at).ok()
    assert read_remote(tmp_path / "runs" / far.run_id) is not None
    store = {"url": "embedded", "endpoint_url": servers[1]}
    own: dict[str, Any] = {"redis": {"url": "embedded"}, "store": store, "initialize_from": f"{place}/final"}
    config = _config(tmp_path / "next", servers, **own)
    description = describe_environment(config)
    (begun,) = first_policies(config, description).values()
    assert begun.checkpoint.manifest.name == name
    player, data = find_player("league.fixed.rival", f"{place}/final", config.runs_dir, description, config.store)
    assert data == far.checkpoint_store().load(name).objects["default/policy.safetensors"]
    assert (player.kind, player.seats) == ("policy", ("default",))


def _lease(run: Run) -> RunLease:
    """Of another coordinator of this process."""
    address = Address(run.run_id, run.config.redis.url, run.config.store.url, run.config.store.endpoint_url)
    return RunLease(open_run_context(run.config, address, "coordinator"))


def test_linked_run_is_known_and_not_resumed_here(
    far: Run, here: Run, servers: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert here.run_id == far.run_id
    assert not here.live
    assert here.status().reason == "exhausted"
    assert [entry["name"] for entry in here.checkpoints()] == [entry["name"] for entry in far.checkpoints()]
    again = Run.attach(far.run_id, tmp_path / "here")
    assert again.status().env_steps == far.status().env_steps, "from then on its id is enough"
    monkeypatch.setenv("STAGECOACH__STORE__ENDPOINT_URL", servers[1])
    told = Run.attach(f"s3://stagecoach/{far.run_id}", tmp_path / "told").status()
    assert told.env_steps == far.status().env_steps, "the endpoint may be in the environment"
    assert again.config.hash() == far.config.hash()
    for continue_it in (here.take_up, partial(Run.resume, far.run_id, tmp_path / "here")):
        with pytest.raises(UserError, match=r"stagecoach train CONFIG --address URL --run-id .* --or-resume"):
            continue_it()


def test_linked_run_is_live_while_it_beats_and_takes_orders(far: Run, here: Run, redis_server: RedisServer) -> None:
    with pytest.raises(UserError, match="is not live"):
        here.scale(3)
    with _process(_OTHER_MACHINE, redis_server.password, redis_server.url, far.run_id):
        assert here.live
        assert far.live, "on its own machine, too, if it was taken up on another one"
        here.scale(3)
        assert here.status().desired_workers == 3
        with pytest.raises(UserError, match=r"is live, and its trainer prunes by itself"):
            here.prune()
    poll(Wait("its silence to be seen", stretched(30)), lambda: not here.live)


def test_unreachable_redis_is_reported_and_store_still_shown(
    far: Run, servers: tuple[str, str], tmp_path: Path
) -> None:
    place, nowhere = f"s3://stagecoach/{far.run_id}", "redis://127.0.0.1:9"
    here = Run.attach(place, tmp_path / "here", endpoint_url=servers[1], redis_url=nowhere)
    assert here.status().reason == "exhausted", "the store knows the end"
    far.checkpoint_store().store.delete(".finished")
    status = here.status()
    assert status.state == "unknown"
    assert "127.0.0.1:9 does not answer" in status.reason
    with pytest.raises(RedisUnavailable, match=r"127\.0\.0\.1:9 does not answer"):
        here.stop()


def test_wrong_places_are_named(far: Run, servers: tuple[str, str], tmp_path: Path) -> None:
    place = f"s3://stagecoach/{far.run_id}"
    cases: list[tuple[type[Exception], str, str, str, str]] = [
        (RunNotFound, "no run at s3://stagecoach/nobody", "s3://stagecoach/nobody", "here", servers[1]),
        (StoreUnavailable, "the bucket 'elsewhere' does not exist", f"s3://elsewhere/{far.run_id}", "here", servers[1]),
        (StoreUnavailable, "does not answer", place, "here", "http://127.0.0.1:9"),
        (UserError, "expected a run's folder", "http://127.0.0.1/run", "here", servers[1]),
        (UserError, "is already a run of this machine", place, "there", servers[1]),
    ]
    for error, said, location, runs, endpoint_url in cases:
        with pytest.raises(error, match=said):
            Run.attach(location, tmp_path / runs, endpoint_url=endpoint_url)
    assert not (tmp_path / "here").exists(), "nothing is left behind"


def test_run_continues_on_another_machine(far: Run, servers: tuple[str, str], tmp_path: Path) -> None:
    def start(folder: str, **sections: Any) -> Run:
        return Run.start(_config(tmp_path / folder, servers, **sections), far.run_id, inline=True, or_resume=True)

    done = start("third")
    assert done.ended
    assert done.wait(10).reason == "exhausted", "it has reached its end: nothing is started"
    with pytest.raises(UserError, match=r"seed cannot change in a resume, .*start a new run"):
        start("fourth", seed=7)
    outcome = start("third", stop_at={"updates": 4}).wait(60)
    assert (outcome.reason, outcome.status.updates) == ("exhausted", 4)
    assert not (tmp_path / "fourth" / far.run_id).exists()


@pytest.mark.parametrize("where", some_quick(["here", "elsewhere"], "here"))
def test_lease_is_kept_by_live_coordinator_only(far: Run, tmp_path: Path, servers: tuple[str, str], where: str) -> None:
    """Whatever folder of runs it has, and even where containers give all of them one name and one process id."""
    further = _config(tmp_path / "third", servers, stop_at={"updates": 4})
    with (
        _other_coordinator(further, far.run_id, where) as other,
        pytest.raises(UserError, match=rf"is live already: its coordinator is process {other.pid} on \S+;"),
    ):
        Run.start(further, far.run_id, inline=True, or_resume=True)
    outcome = Run.start(further, far.run_id, inline=True, or_resume=True).wait(90)  # elsewhere: once it falls silent
    assert outcome.reason == "exhausted"


@pytest.mark.processes
def test_lease_lost_to_another_coordinator_ends_the_first(far: Run) -> None:
    taking = _lease(far)
    with _other_coordinator(far.config, far.run_id, "elsewhere") as other:
        assert other.stdout is not None
        other.send_signal(signal.SIGSTOP)
        taking.take()
        taking.keep()
        other.send_signal(signal.SIGCONT)
        assert other.stdout.readline() == "lost\n"
    taking.release()
    assert taking.lost is None


def test_lease_is_kept_by_silent_local_coordinator(far: Run, redis_server: RedisServer) -> None:
    """As the one that a copy of the run's folder, with its Redis in it, still names."""
    with _other_coordinator(far.config, far.run_id, "here") as other, redis_server.client() as client:
        other.send_signal(signal.SIGSTOP)
        client.hset(RunKeys(far.run_id).flow, "coordinator_seen", "1")
        with pytest.raises(UserError, match=rf"is live already: its coordinator is process {other.pid} on "):
            _lease(far).take()


def test_two_that_take_a_run_at_once_are_told_apart(far: Run) -> None:
    leases = [_lease(far) for _ in range(8)]

    def took(lease: RunLease) -> bool:
        try:
            lease.take()
        except UserError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(took, leases)) == 1


def test_lease_outlasts_redis_that_names_a_former_holder(
    far: Run, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lease, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(run_lease, "DEAD_AFTER_SECONDS", 2.0)
    lease, key = _lease(far), RunKeys(far.run_id).flow
    lease.take()
    lease.keep()
    with redis_server.client() as given:
        client: Any = given

        def names_another(second: int) -> None:
            seen = client.time()[0] + second
            client.hset(key, mapping={"coordinator": "other 1 machine 1 token", "coordinator_seen": seen})

        names_another(0)
        eventually(lambda: client.hget(key, "coordinator") == lease.name.encode())
        assert lease.lost is None
        for second in range(5):  # one that is there
            names_another(second)
            time.sleep(0.3)
        assert eventually(lambda: lease.lost)
    lease.release()


_OTHER_MACHINE = """
import socket, sys, time, redis
socket.gethostname = lambda: "other"
from stagecoach.shared.protocol.heartbeat import Heartbeat
client = redis.Redis.from_url(sys.argv[1], password=sys.stdin.readline())
Heartbeat(client, sys.argv[2], "coordinator", "coordinator").start()
print("at work", flush=True)
time.sleep(600)
"""


@contextmanager
def _process(code: str, told: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Python code in another process, at work from here on, which is killed in the end: its last sign is new then."""
    command = [sys.executable, "-c", code, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(told)
    process.stdin.close()
    try:
        assert process.stdout.readline() == "at work\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


_OTHER_COORDINATOR = """
import json, sys, time
from stagecoach.coordinator.lifecycle import run_lease
from stagecoach.rollout_worker.environments.description import describe_environment
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.base.address import Address
from stagecoach.shared.runtime.run_context import open_run_context
told = json.load(sys.stdin)
if told["where"] == "elsewhere":
    run_lease._machine = lambda: "another"
config = Config.model_validate(told["config"])
context = open_run_context(config, Address(**told["address"]), "coordinator")
made = run_lease.RunLease(context, lambda: print("lost", flush=True))
made.take()
made.keep()
print("at work", flush=True)
time.sleep(600)
"""


def _other_coordinator(config: Config, run_id: str, where: str) -> AbstractContextManager[subprocess.Popen[str]]:
    address = asdict(Address(run_id, config.redis.url, config.store.url, config.store.endpoint_url))
    told = {"where": where, "config": config.model_dump(mode="json"), "address": address}
    return _process(_OTHER_COORDINATOR, json.dumps(told))


def test_submission_is_recorded(tmp_path: Path) -> None:
    submission = Submission(cluster="http://head:8265", working_dir="/work", command=("train", "x.yaml"))
    known = RemoteLink(redis_url="redis://a", job="j-1", submission=submission)
    known.write(tmp_path)
    assert read_remote(tmp_path) == known
    assert read_remote(tmp_path / "nowhere") is None


def test_unreachable_head_is_reported_with_ssh_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state file is the one that `ray up` leaves here."""
    head = "255.255.255.255"
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    tags = {"ray-node-type": "head", "ray-node-status": "up-to-date", "ray-user-node-type": "local.cluster.node"}
    state = tmp_path / "ray" / "cluster-gone.state"
    state.write_text(json.dumps({head: {"tags": tags, "state": "running"}}))
    cluster = tmp_path / "cluster.yaml"
    auth = {"ssh_user": "nobody", "ssh_private_key": str(tmp_path / "key")}
    provider = {"type": "local", "head_ip": head, "worker_ips": []}
    content = {"cluster_name": "gone", "provider": provider, "auth": auth, "min_workers": 0, "max_workers": 0}
    cluster.write_text(yaml.safe_dump(content))
    with pytest.raises(UserError, match=rf"ssh: connect to host {head} port 22: .*; is it up\? `ray up"):
        JobServer(str(cluster))
