"""The fleet on a real Ray: what raises is restarted, what dies or falls silent is replaced, within limits that end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from stagecoach.coordinator.catalog.status import Status
from stagecoach.coordinator.run_access.run import Run
from stagecoach.coordinator.services.ray_head import hold_ray
from stagecoach.shared.base.errors import UserError
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.protocol.flow_control import Flow
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.runtime.launch import LOGS
from tests.conftest import minimal_config
from tests.support.environments.small import MODULE
from tests.support.processes.command_line import redis_of, until
from tests.support.services import ray_head

pytestmark = [pytest.mark.timeout(240), pytest.mark.ray]
MakeConfig = Callable[..., Config]
FOR_EVER = {"updates": 10**6}


@pytest.fixture(scope="module", autouse=True)
def _ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One Ray for all tests of this module; a run that starts in a process which is connected uses that one."""
    head = hold_ray(minimal_config(), tmp_path_factory.mktemp("ray"))
    head.wait()
    head.connect()
    yield
    head.release()


@pytest.fixture
def running() -> Iterator[ExitStack]:
    """Ends the runs that a failed test leaves."""
    with ExitStack() as running:
        yield running


def start(config: Config, running: ExitStack) -> Run:
    run = Run.start(config, "a")
    running.callback(run.wait, 60)
    running.callback(run.abandon)
    return run


def check_stopped(run: Run, failures: bool = False) -> None:
    run.stop()
    outcome = run.wait(120)
    assert outcome.reason == "stopped"
    assert outcome.status.ledger["total"]["balances"]
    assert failures or told_of(run, "failed") == []


def process_of(run: Run, id_: str, former: int | None = None) -> int:
    """The process of a role, once that is there and another one than `former`."""

    def found(status: Status) -> list[int]:
        return [beat.pid for beat in status.roles if beat.id == id_ and beat.alive and beat.pid != former]

    return found(until(run, lambda status: bool(found(status))))[0]


def goes_on(run: Run) -> None:
    version = max(0, run.status().version)
    until(run, lambda status: status.version > version + 1)


def told_of(run: Run, pattern: str = "", kind: str | None = None) -> list[str]:
    """The events in which this is found, or of this kind."""
    return [event.text for event in run.events() if re.search(pattern, event.text) and kind in (None, event.kind)]


def counting(fails: str, **more: Any) -> dict[str, Any]:
    return {"id": f"{MODULE}:Counting", "kwargs": {"fails": fails, "fails_at": 1}, "num_envs": 4} | more


@pytest.mark.parametrize(
    ("name", "times", "more", "told"),
    [
        ("FailsAFewTimes", 3, {"failures_allowed": 0}, "^worker-0 failed: environment: "),
        ("Hangs", 1, {"step_deadline_seconds": 3.0}, "environment: worker-0 hangs in step of its environments, at "),
    ],
)
def test_worker_that_raises_or_hangs_is_replaced(
    config: MakeConfig, tmp_path: Path, running: ExitStack, name: str, times: int, more: dict[str, float], told: str
) -> None:
    kwargs = {"tally": str(tmp_path / "tally"), "times": times}
    environment = {"id": f"{MODULE}:{name}", "kwargs": kwargs, "num_envs": 2} | more
    run = start(config(environment=environment, evaluation={"episodes": 1, "kwargs": {"times": 0}}), running)
    outcome = run.wait(120)
    assert (outcome.reason, (tmp_path / "tally").read_text()) == ("exhausted", "x" * times)
    assert told_of(run, told)
    assert outcome.status.ledger["total"]["balances"]


def test_environment_that_exits_is_given_up_by_name(config: MakeConfig, running: ExitStack) -> None:
    """A bound by seconds let it be started again without end on a slow machine, and no event said why it ended."""
    evaluation = {"episodes": 1, "kwargs": {"fails": ""}}
    run = start(config(environment=counting("crash"), evaluation=evaluation, rollout={"restarts_allowed": 2}), running)
    outcome = run.wait(200)
    assert outcome.users_fault
    told = told_of(run, "^worker-0 failed: environment: ")
    assert len(told) == 3
    for text in (*told, outcome.reason, (run.folder.path / LOGS / "coordinator.log").read_text()):
        assert "was ended by SIGSEGV" in text
        assert "support/environments/small.py" in text  # who did it
    assert told_of(run, "worker-0 is given up: it failed 3 times in a row")
    assert "no rollout worker is left" in outcome.reason
    assert outcome.status.state == "finished"


def test_failing_evaluator_does_not_end_bounded_run(config: MakeConfig, running: ExitStack) -> None:
    evaluation = {"episodes": 1, "kwargs": {"fails": "exit", "fails_at": 0}, "final_wait_seconds": 5}
    run = start(config(environment=counting(""), evaluation=evaluation, rollout={"restarts_allowed": 1}), running)
    outcome = run.wait(120)
    assert (outcome.reason, outcome.status.evaluation) == ("exhausted", None)


def test_silent_worker_is_replaced_and_old_process_ignored(config: MakeConfig, running: ExitStack) -> None:
    """As after its machine was cut off and came back: for some seconds both are there, under one name."""
    run = start(config(stop_at=FOR_EVER, rollout={"silent_seconds": 10.5, "restarts_allowed": 2}), running)
    until(run, lambda status: status.version > 2)
    pid = process_of(run, "worker-0")
    os.kill(pid, signal.SIGSTOP)
    pid = process_of(run, "worker-0", pid)
    goes_on(run)
    key = RunKeys("a").heartbeats("worker")
    with redis_of(run) as client:
        beat = cast(bytes, client.hget(key, "worker-0")).decode().partition(" ")[2]
        os.kill(pid, signal.SIGKILL)
        process_of(run, "worker-0", pid)
        for _ in range(6):
            for _ in range(20):  # a second long, in which the fleet looks five times
                seconds, micros = client.time()
                client.hset(key, "worker-0", f"{seconds}.{micros:06d} {beat}")
                time.sleep(0.05)
            process_of(run, "worker-0", pid)
            time.sleep(0.5)
    assert told_of(run, "given up") == []
    goes_on(run)
    check_stopped(run, failures=True)


def test_forged_heartbeat_kills_no_other_process(config: MakeConfig, running: ExitStack) -> None:
    """Whoever can write to Redis could name any process there; the worker that is silent is ended, and no other."""
    run = start(config(stop_at=FOR_EVER, rollout={"silent_seconds": 10.5, "restarts_allowed": 2}), running)
    until(run, lambda status: status.version > 2)
    stranger = subprocess.Popen(["ray::Role.run", "300"], executable="/usr/bin/sleep")
    running.callback(stranger.wait)
    running.callback(stranger.kill)
    pid = process_of(run, "worker-0")
    os.kill(pid, signal.SIGSTOP)
    key = RunKeys("a").heartbeats("worker")
    with redis_of(run) as client:
        said = cast(bytes, client.hget(key, "worker-0")).decode()
        client.hset(key, "worker-0", said.replace(f'"pid": {pid}', f'"pid": {stranger.pid}'))
    until(
        run, lambda status: any(beat.id == "worker-0" and beat.pid not in (pid, stranger.pid) for beat in status.roles)
    )
    assert stranger.poll() is None
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text()
    check_stopped(run, failures=True)


def test_trainer_without_progress_ends_the_run(config: MakeConfig, running: ExitStack) -> None:
    policies = {"default": {"transform": f"{MODULE}:end_this_process"}}
    run = start(config(stop_at=FOR_EVER, policies=policies, rollout={"restarts_allowed": 1}), running)
    outcome = run.wait(150)
    assert outcome.reason.startswith("failed: trainer: its process (pid ")
    assert "ended with exit code 4; it said last: " in outcome.reason
    assert "it failed 2 times in a row without progress (rollout.restarts_allowed)" in outcome.reason
    assert outcome.status.state == "finished"


def test_progress_and_outages_excuse_deaths(config: MakeConfig, tmp_path: Path, running: ExitStack) -> None:
    store = tmp_path / "store"
    store.mkdir()
    run = start(config(stop_at=FOR_EVER, store={"url": f"file://{store}"}, rollout={"restarts_allowed": 0}), running)
    former = None
    for _ in range(3):
        former = process_of(run, "trainer", former)
        goes_on(run)
        os.kill(former, signal.SIGKILL)
    goes_on(run)
    told = told_of(run, "^trainer failed: ")
    assert len(told) == 3
    assert all("was killed without a message" in text for text in told)

    former = process_of(run, "worker-0")
    store.rename(tmp_path / "away")
    for number in range(3):
        os.kill(former, signal.SIGKILL)  # the first one had made progress; the others wait for the store
        process_of(run, "worker-0", former)
        status = until(run, lambda s: any(beat.id == "worker-0" and beat.outage for beat in s.roles))
        former = process_of(run, "worker-0")
        assert status.state == "running", number
    (tmp_path / "away").rename(store)
    goes_on(run)
    back = "the store is back; the run continues"  # once the last role has found it
    until(run, lambda status: bool(told_of(run, back)))
    told = told_of(run, kind="outage")
    assert "the run waits for the store, which is away (" in told[0] and "the store folder" in told[0]
    check_stopped(run, failures=True)


def test_roles_start_in_order_and_survive_eviction(
    config: MakeConfig, running: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stagecoach.coordinator.fleet.fleet._OTHERS_FIRST_SECONDS", 120.0)
    run = start(config(**slow(0.02), rollout={"fragments_per_update": 4}), running)
    process_of(run, "evaluator")
    logs = run.folder.path / LOGS
    begun = {name: (logs / f"{name}.log").read_text().split(" [")[0] for name in ("trainer", "worker-0", "evaluator")}
    assert begun["evaluator"] > max(begun["trainer"], begun["worker-0"])

    until(run, lambda status: status.version > 2)
    for name in ("trainer", "worker-0", "evaluator"):
        pid = process_of(run, name)
        os.kill(pid, signal.SIGTERM)
        process_of(run, name, pid)
        assert run.status().state == "running"
        goes_on(run)
    told = told_of(run, "it continues in a new process")
    assert [text.partition(" ")[0] for text in told] == ["trainer", "worker-0", "evaluator"]

    for count in (4, 1, 4, 2, 4):
        run.scale(count)
        time.sleep(0.3)  # the fleet takes some notice, the workers are in the midst of a fragment, or of their start
    until(run, lambda status: at_work(status) == names(4))
    run.scale(1)
    run.scale(4)
    before = run.status()
    after = until(run, lambda status: at_work(status) == names(4) and status.version > before.version + 10)
    assert after.desired_workers == 4
    run.scale(1)
    until(run, lambda status: {beat.id for beat in status.roles if beat.role == "worker"} == names(1))
    goes_on(run)
    check_stopped(run)


def at_work(status: Status) -> set[str]:
    return {beat.id for beat in status.roles if beat.role == "worker" and beat.alive and beat.progress["fragments"]}


def names(count: int) -> set[str]:
    return {f"worker-{index}" for index in range(count)}


def slow(seconds: float) -> dict[str, Any]:
    return {
        "environment": {"id": f"{MODULE}:Slow", "kwargs": {"seconds": seconds}, "num_envs": 1},
        "algorithm": {"minibatch_size": 16, "epochs": 1},
        "evaluation": {"episodes": 1, "kwargs": {"seconds": 0.0}},
        "stop_at": FOR_EVER,
    }


def test_auto_grows_while_trainer_waits(config: MakeConfig, running: ExitStack) -> None:
    rollout = {"scaling": "auto", "max_workers": 2, "scaling_window_seconds": 2, "max_policy_lag": 2}
    run = start(config(**slow(0.03), rollout=rollout), running)
    two = until(run, lambda status: at_work(status) == names(2))
    assert two.desired_workers == 2
    until(run, lambda status: bool(told_of(run, "but 2 is", "scaling")))
    first = told_of(run, kind="scaling")[0]
    assert first.startswith("scaled 1 → 2: the trainer waited ") and "for experience" in first
    assert run.scale(1) == "to 1 worker"
    after = until(run, lambda status: at_work(status) == names(1))
    assert after.scaling["mode"] == "fixed"
    check_stopped(run)


def pending() -> int:
    return sum(its.state in (its.PENDING_CREATION, its.DEPENDENCIES_UNREADY) for its in ray_head.actors().values())


def test_scale_refuses_excess_and_removes_unplaced_worker(config: MakeConfig, running: ExitStack) -> None:
    big = {"num_cpus": 30, "max_policy_lag": 1}
    with pytest.raises(UserError) as refused:
        start(config(rollout=big | {"workers": 3}), running)
    said = "3 workers with 30 CPUs each requested, but embedded Ray (1 machine, 64 CPUs by count, on "
    assert said in str(refused.value) and "; the trainer takes 1 CPU" in str(refused.value)
    assert "has room for 2: --set rollout.workers=2, or raise ray.num_cpus" in str(refused.value)
    small = config(rollout=big, stop_at=FOR_EVER)
    assert not (small.runs_dir / "a").exists(), "nothing was written"

    run = start(small, running)
    status = until(run, lambda status: bool(status.scaling.get("capacity")) and status.version > 2)
    assert status.scaling["capacity"].now == 2
    with pytest.raises(UserError, match=r"has room for 2: stagecoach scale a 2, or "):
        run.scale(3)
    assert run.status().desired_workers == 1
    with redis_of(run) as client:
        Flow(client, run.run_id).set_desired_workers(3)  # as if a machine had gone since
    until(run, lambda status: at_work(status) == names(2) and pending() == 1)
    run.scale(2)
    until(run, lambda status: pending() == 0)
    assert at_work(run.status()) == names(2)
    with redis_of(run) as client:
        Flow(client, run.run_id).set_desired_workers(3)
    until(run, lambda status: pending() == 1)
    check_stopped(run)  # whoever never had a process is not waited for
