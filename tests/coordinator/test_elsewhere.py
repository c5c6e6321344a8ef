"""Runs whose coordinator is on another machine, seen from here: real Redis and S3, the coordinator's beat by hand."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from coordinator.elsewhere import Elsewhere, Submission, read_elsewhere
from coordinator.run import Run
from coordinator.tenure import Tenure
from shared.config import Config
from shared.connection import Address
from shared.errors import RedisUnavailable, RunNotFound, StoreUnavailable, UserError
from shared.heartbeat import Wait, poll
from shared.redis_keys import RunKeys
from shared.role import open_role
from tests.conftest import RedisServer, minimal_config
from tests.support.groups import some_quick
from tests.support.speed import stretched

RUN = "far"


@pytest.fixture
def services(
    redis_server: RedisServer, s3_servers: dict[str, tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch
) -> tuple[str, str]:
    """URL of Redis and endpoint of the store, with their credentials in the environment."""
    endpoint, access, secret = s3_servers["rclone"]
    monkeypatch.setenv("STAGECOACH_REDIS_PASSWORD", redis_server.password)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", access)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    return redis_server.url, endpoint


@pytest.fixture
def far(services: tuple[str, str], tmp_path: Path, unique_run_id: str) -> Run:
    """A run that has trained and ended on another machine (another folder of runs)."""
    run = Run.start(_config(tmp_path / "there", services), unique_run_id, inline=True)
    assert run.wait(60).reason == "exhausted"
    return run


def _config(runs: Path, services: tuple[str, str]) -> Config:
    return minimal_config(
        runs_dir=str(runs),
        rollout={"workers": 1, "fragment_steps": 8, "fragments_per_update": 1},
        evaluation={"episodes": 1},
        stop_at={"updates": 2},
        redis={"url": services[0]},
        store={"url": "s3://stagecoach", "endpoint_url": services[1]},
    )


def test_a_run_is_known_here_by_its_folder_in_the_store(far: Run, services: tuple[str, str], tmp_path: Path) -> None:
    location = f"s3://stagecoach/{far.run_id}"
    here = Run.attach(location, tmp_path / "here", endpoint_url=services[1])
    assert here.run_id == far.run_id
    assert not here.live
    assert here.status().reason == "exhausted"
    assert [entry["name"] for entry in here.checkpoints()] == [entry["name"] for entry in far.checkpoints()]
    again = Run.attach(far.run_id, tmp_path / "here")
    assert again.status().env_steps == far.status().env_steps, "from then on its id is enough"
    assert again.config.hash() == far.config.hash()


def test_it_is_live_while_its_coordinator_beats_and_obeys_from_here(
    far: Run, services: tuple[str, str], tmp_path: Path, redis_server: RedisServer
) -> None:
    here = Run.attach(f"s3://stagecoach/{far.run_id}", tmp_path / "here", endpoint_url=services[1])
    with pytest.raises(UserError, match="is not live"):
        here.scale(3)
    with _beating(redis_server, far.run_id):
        assert here.live
        assert far.live, "on its own machine, too, if it was taken up on another one"
        here.scale(3)
        assert here.status().desired_workers == 3
        with pytest.raises(UserError, match=r"is live, and its trainer prunes by itself"):
            here.prune()
    poll(Wait("its silence to be seen", stretched(30)), lambda: not here.live)


def test_a_redis_that_cannot_be_reached_from_here_is_said_and_hides_nothing(
    far: Run, services: tuple[str, str], tmp_path: Path
) -> None:
    here = Run.attach(
        f"s3://stagecoach/{far.run_id}", tmp_path / "here", endpoint_url=services[1], redis_url="redis://127.0.0.1:9"
    )
    assert here.status().reason == "exhausted", "the store knows the end"
    far.checkpoint_store().store.delete(".finished")
    status = here.status()
    assert status.state == "unknown"
    assert "127.0.0.1:9 does not answer" in status.reason
    with pytest.raises(RedisUnavailable, match=r"127\.0\.0\.1:9 does not answer"):
        here.stop()


def test_wrong_places_are_named(far: Run, services: tuple[str, str], tmp_path: Path) -> None:
    def attach(location: str, endpoint_url: str = services[1]) -> Run:
        return Run.attach(location, tmp_path / "here", endpoint_url=endpoint_url)

    with pytest.raises(RunNotFound, match="no run at s3://stagecoach/nobody"):
        attach("s3://stagecoach/nobody")
    with pytest.raises(StoreUnavailable, match="there is no bucket 'elsewhere'"):
        attach(f"s3://elsewhere/{far.run_id}")
    with pytest.raises(StoreUnavailable, match="does not answer"):
        attach(f"s3://stagecoach/{far.run_id}", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="expected a run's folder"):
        attach("http://127.0.0.1/run")
    with pytest.raises(UserError, match="is a run of this machine already"):
        Run.attach(f"s3://stagecoach/{far.run_id}", tmp_path / "there", endpoint_url=services[1])
    assert not (tmp_path / "here").exists(), "nothing is left behind"


@pytest.mark.processes
def test_who_has_only_a_link_cannot_resume_and_is_told_how(far: Run, services: tuple[str, str], tmp_path: Path) -> None:
    here = Run.attach(f"s3://stagecoach/{far.run_id}", tmp_path / "here", endpoint_url=services[1])
    with pytest.raises(UserError, match=f"stagecoach attach {far.run_id}"):
        Run.resume(far.run_id, tmp_path / "here")
    with pytest.raises(UserError, match=r"train CONFIG --address … --run-id .* --or-resume"):
        here.take_up()


def test_a_run_goes_on_where_another_machine_has_left_it(far: Run, services: tuple[str, str], tmp_path: Path) -> None:
    more = _config(tmp_path / "third", services).model_copy(update={"stop_at": far.config.stop_at})
    done = Run.start(more, far.run_id, inline=True, or_resume=True)
    assert done.ended
    assert done.wait(10).reason == "exhausted", "it has reached its end: nothing is started"
    further = _config(tmp_path / "third", services).model_dump() | {"stop_at": {"updates": 4}}
    outcome = Run.start(Config.model_validate(further), far.run_id, inline=True, or_resume=True).wait(60)
    assert (outcome.reason, outcome.status.updates) == ("exhausted", 4)
    other = Config.model_validate(further | {"seed": 7, "runs_dir": str(tmp_path / "fourth")})
    with pytest.raises(UserError, match="start a new run for that"):
        Run.start(other, far.run_id, inline=True, or_resume=True)
    assert not (tmp_path / "fourth" / far.run_id).exists()


def test_or_resume_starts_what_is_not_there_yet(services: tuple[str, str], tmp_path: Path, unique_run_id: str) -> None:
    run = Run.start(_config(tmp_path / "runs", services), unique_run_id, inline=True, or_resume=True)
    assert run.wait(60).reason == "exhausted"


@pytest.mark.parametrize("where", some_quick(["here", "elsewhere"], "here"))
def test_a_coordinator_at_work_keeps_its_run_and_a_dead_one_does_not(
    far: Run, tmp_path: Path, services: tuple[str, str], where: str
) -> None:
    """Whatever folder of runs it has, and even where containers give all of them one name and one process id."""
    further = Config.model_validate(_config(tmp_path / "third", services).model_dump() | {"stop_at": {"updates": 4}})
    with (
        _other_coordinator(further, far.run_id, where) as other,
        pytest.raises(UserError, match=rf"is live already: its coordinator is process {other.pid} on \S+;"),
    ):
        Run.start(further, far.run_id, inline=True, or_resume=True)
    outcome = Run.start(further, far.run_id, inline=True, or_resume=True).wait(90)  # elsewhere: once it falls silent
    assert outcome.reason == "exhausted"


@pytest.mark.processes
def test_a_coordinator_that_was_cut_off_lets_go_of_a_run_that_another_has_taken(
    far: Run, services: tuple[str, str]
) -> None:
    address = Address(far.run_id, services[0], "s3://stagecoach", services[1])
    taking = Tenure(open_role(far.config, address, "coordinator"))
    with _other_coordinator(far.config, far.run_id, "elsewhere") as other:
        assert other.stdout is not None
        other.send_signal(signal.SIGSTOP)
        taking.take()
        taking.keep(lambda: None)
        other.send_signal(signal.SIGCONT)
        assert other.stdout.readline() == "lost\n"
    taking.release()
    assert taking.lost is None


def test_a_coordinator_of_this_machine_that_is_silent_and_there_keeps_its_run(
    far: Run, services: tuple[str, str], redis_server: RedisServer
) -> None:
    """As the one that a copy of the run's folder, with its Redis in it, still names."""
    address = Address(far.run_id, services[0], "s3://stagecoach", services[1])
    with _other_coordinator(far.config, far.run_id, "here") as other, redis_server.client() as client:
        other.send_signal(signal.SIGSTOP)
        client.hset(RunKeys(far.run_id).flow, "coordinator_seen", "1")
        with pytest.raises(UserError, match=rf"is live already: its coordinator is process {other.pid} on "):
            Tenure(open_role(far.config, address, "coordinator")).take()


def test_two_that_take_a_run_at_once_are_told_apart(far: Run, services: tuple[str, str]) -> None:
    address = Address(far.run_id, services[0], "s3://stagecoach", services[1])
    tenures = [Tenure(open_role(far.config, address, "coordinator")) for _ in range(8)]

    def took(tenure: Tenure) -> bool:
        try:
            tenure.take()
        except UserError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(took, tenures)) == 1


_OTHER_MACHINE = """
import socket, sys, time, redis
socket.gethostname = lambda: "other"
from shared.heartbeat import Heartbeat
client = redis.Redis.from_url(sys.argv[1], password=sys.stdin.readline())
Heartbeat(client, sys.argv[2], "coordinator", "coordinator").start()
print("beating", flush=True)
time.sleep(600)
"""


@contextmanager
def _beating(server: RedisServer, run_id: str) -> Iterator[None]:
    """A coordinator on a machine of another name, which is killed in the end: its last beat is a moment old then."""
    process = subprocess.Popen(
        [sys.executable, "-c", _OTHER_MACHINE, server.url, run_id], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(server.password)
    process.stdin.close()
    try:
        assert process.stdout.readline() == "beating\n"
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


_OTHER_COORDINATOR = """
import json, sys, time
from coordinator import tenure
from shared.config import Config
from shared.connection import Address
from shared.role import open_role
told = json.load(sys.stdin)
if told["where"] == "elsewhere":
    tenure._machine = lambda: "another"
config = Config.model_validate(told["config"])
made = tenure.Tenure(open_role(config, Address(**told["address"]), "coordinator"))
made.take()
made.keep(lambda: print("lost", flush=True))
print("at work", flush=True)
time.sleep(600)
"""


@contextmanager
def _other_coordinator(config: Config, run_id: str, where: str) -> Iterator[subprocess.Popen[str]]:
    """In another process, which is killed in the end: its last sign is a moment old then."""
    address = Address(run_id, config.redis.url, config.store.url, config.store.endpoint_url)
    told = {"where": where, "config": config.model_dump(mode="json"), "address": address.as_dict()}
    process = subprocess.Popen(
        [sys.executable, "-c", _OTHER_COORDINATOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    json.dump(told, process.stdin)
    process.stdin.close()
    try:
        assert process.stdout.readline() == "at work\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_what_was_submitted_is_remembered(tmp_path: Path) -> None:
    known = Elsewhere("redis://a", None, Submission("http://head:8265", "/work", ("train", "x.yaml")), "j-1")
    known.write(tmp_path)
    assert read_elsewhere(tmp_path) == known
    assert read_elsewhere(tmp_path / "nowhere") is None
