"""The fleet on a real Ray: what raises is restarted, what dies or falls silent is replaced, within limits that end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
import ray

from coordinator.ray_head import RayHead
from coordinator.run import Run
from coordinator.status import Status
from shared.config import Config
from shared.connection import connect_redis
from shared.errors import UserError
from shared.heartbeat import Wait
from shared.launch import LOGS
from shared.redis_keys import RunKeys
from tests.conftest import minimal_config
from tests.environments_for_tests import MODULE
from tests.support.speed import stretched

pytestmark = [pytest.mark.timeout(240), pytest.mark.ray]
MakeConfig = Callable[..., Config]
ROLLOUT = {"workers": 1, "fragment_steps": 8, "fragments_per_update": 2}


@pytest.fixture(scope="module")
def _ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One Ray for all tests of this module; a run that starts in a process which is connected uses that one."""
    head = RayHead(minimal_config(), tmp_path_factory.mktemp("ray"))
    head.connect()
    yield
    head.stop()


@pytest.fixture
def config(tmp_path: Path, _ray: None) -> MakeConfig:
    def make(**sections: Any) -> Config:
        rollout = ROLLOUT | sections.pop("rollout", {})
        return minimal_config(
            **{"runs_dir": str(tmp_path / "runs"), "rollout": rollout, "evaluation": {"episodes": 1}} | sections
        )

    return make


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


def until(run: Run, done: Callable[[Status], bool]) -> Status:
    wait = Wait("what was to be seen", stretched(120))
    while not done(status := run.status()):
        wait.check()
        time.sleep(0.05)
    return status


def pid_of(status: Status, id_: str) -> int | None:
    return next((beat.pid for beat in status.roles if beat.id == id_ and beat.alive), None)


def counting(fails: str, **more: Any) -> dict[str, Any]:
    return {"id": f"{MODULE}:Counting", "kwargs": {"fails": fails, "fails_at": 1}, "num_envs": 4} | more


def test_a_worker_that_raises_is_restarted_and_the_run_reaches_its_goal(
    config: MakeConfig, tmp_path: Path, running: ExitStack
) -> None:
    kwargs = {"tally": str(tmp_path / "tally"), "times": 3}
    environment = {"id": f"{MODULE}:FailsAFewTimes", "kwargs": kwargs, "num_envs": 4, "failures_allowed": 0}
    run = start(config(environment=environment), running)
    assert run.wait(120).reason == "exhausted"
    assert (tmp_path / "tally").read_text() == "xxx"


@pytest.mark.parametrize("fails", ["exit", "crash"])
def test_an_environment_that_ends_its_process_is_given_up_by_name_whatever_the_clock_says(
    fails: str, config: MakeConfig, running: ExitStack
) -> None:
    """A bound by seconds let it be started again without end on a slow machine, and no event said why it ended."""
    evaluation = {"episodes": 1, "kwargs": {"fails": ""}}
    run = start(config(environment=counting(fails), evaluation=evaluation, rollout={"restarts_allowed": 2}), running)
    outcome = run.wait(200)
    assert outcome.users_fault
    how = {"exit": "ended with exit code 3", "crash": "was ended by SIGSEGV"}[fails]
    told = [event.text for event in run.events() if event.text.startswith("worker-0 failed: environment: ")]
    assert len(told) == 3
    for text in (*told, outcome.reason, (run.folder.path / LOGS / "coordinator.log").read_text()):
        assert how in text
        assert "environments_for_tests.py" in text  # who did it
    assert "no rollout worker is left" in outcome.reason
    assert outcome.status.state == "finished"


def test_an_evaluator_that_fails_does_not_end_a_run_with_another_bound(config: MakeConfig, running: ExitStack) -> None:
    evaluation = {"episodes": 1, "kwargs": {"fails": "exit", "fails_at": 0}, "final_wait_seconds": 5}
    run = start(
        config(environment=counting(""), evaluation=evaluation, rollout={"restarts_allowed": 1}), running
    )  # fmt: skip
    outcome = run.wait(120)
    assert (outcome.reason, outcome.status.evaluation) == ("exhausted", None)


def test_a_silent_worker_is_replaced(config: MakeConfig, running: ExitStack) -> None:
    run = start(config(stop_at={"updates": 10**6}, rollout={"silent_seconds": 10.5}), running)
    before = until(run, lambda status: status.version > 2 and pid_of(status, "worker-0") is not None)
    stopped = pid_of(before, "worker-0")
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)
    after = until(run, lambda status: pid_of(status, "worker-0") not in (None, stopped))
    until(run, lambda status: status.version > after.version)
    run.stop()
    outcome = run.wait(120)
    assert outcome.reason == "stopped"
    assert outcome.status.ledger["total"]["balances"]


def test_a_process_that_was_cut_off_and_beats_in_turns_with_its_successor_is_no_death(
    config: MakeConfig, running: ExitStack
) -> None:
    """As after its machine came back: for some seconds both are there, under one name."""
    run = start(config(stop_at={"updates": 10**6}, rollout={"restarts_allowed": 2}), running)
    before = until(run, lambda status: status.version > 2 and pid_of(status, "worker-0") is not None)
    pid, key, address = pid_of(before, "worker-0"), RunKeys("a").heartbeats, run.folder.live_address()
    assert pid is not None and address is not None
    with connect_redis(address, run.config) as client:
        beat = cast(bytes, client.hget(key, "worker:worker-0")).decode().partition(" ")[2]
        os.kill(pid, signal.SIGKILL)
        until(run, lambda status: pid_of(status, "worker-0") not in (None, pid))
        for _ in range(6):
            for _ in range(20):  # a second long, in which the fleet looks five times
                seconds, micros = cast(tuple[int, int], client.time())
                client.hset(key, "worker:worker-0", f"{seconds}.{micros:06d} {beat}")
                time.sleep(0.05)
            until(run, lambda status: pid_of(status, "worker-0") not in (None, pid))
            time.sleep(0.5)
    assert not [event for event in run.events() if "given up" in event.text]
    version = run.status().version
    until(run, lambda status: status.version > version)
    run.stop()


def test_a_trainer_that_gets_nowhere_ends_the_run_which_says_so(config: MakeConfig, running: ExitStack) -> None:
    policies = {"default": {"transform": f"{MODULE}:end_this_process"}}
    run = start(config(stop_at={"updates": 10**6}, policies=policies, rollout={"restarts_allowed": 1}), running)
    outcome = run.wait(150)
    assert outcome.reason.startswith("failed: trainer: its process (pid ")
    assert "ended with exit code 4; it said last: " in outcome.reason
    assert "it failed 2 times in a row without progress (rollout.restarts_allowed)" in outcome.reason
    assert outcome.status.state == "finished"


def test_a_trainer_that_makes_progress_may_die_as_often_as_it_likes(config: MakeConfig, running: ExitStack) -> None:
    """In less time than ten deaths were allowed in, and more often in all than without progress."""
    run = start(config(stop_at={"updates": 10**6}, rollout={"restarts_allowed": 0}), running)
    former = None
    for _ in range(3):
        begun = until(run, lambda s, former=former: pid_of(s, "trainer") not in (None, former))  # type: ignore[misc]
        former = pid_of(begun, "trainer")
        version = until(run, lambda s, begun=begun: s.version > max(0, begun.version)).version  # type: ignore[misc]
        assert former is not None
        os.kill(former, signal.SIGKILL)
    until(run, lambda status: status.version > version + 1)
    told = [event.text for event in run.events() if event.text.startswith("trainer failed: ")]
    assert len(told) == 3
    assert all("was killed: it said nothing of its end" in text for text in told)
    run.stop()
    outcome = run.wait(120)
    assert outcome.reason == "stopped"
    assert outcome.status.ledger["total"]["balances"]


def test_deaths_in_an_outage_do_not_count(config: MakeConfig, tmp_path: Path, running: ExitStack) -> None:
    store = tmp_path / "store"
    store.mkdir()
    run = start(
        config(stop_at={"updates": 10**6}, store={"url": f"file://{store}"}, rollout={"restarts_allowed": 0}), running
    )
    status = until(run, lambda status: status.version > 2 and pid_of(status, "worker-0") is not None)
    store.rename(tmp_path / "away")
    former = pid_of(status, "worker-0")
    for number in range(3):
        assert former is not None
        os.kill(former, signal.SIGKILL)  # the first one had made progress; the others wait for the store
        until(run, lambda s, former=former: pid_of(s, "worker-0") not in (None, former))  # type: ignore[misc]
        status = until(run, lambda s: any(beat.id == "worker-0" and beat.outage for beat in s.roles))
        former = pid_of(status, "worker-0")
        assert status.state == "running", number
    (tmp_path / "away").rename(store)
    version = run.status().version
    until(run, lambda status: status.version > version)
    back = "the store is back; the run continues"  # once the last role has found it
    until(run, lambda status: back in [event.text for event in run.events()])
    told = [event.text for event in run.events() if event.kind == "outage"]
    assert "the run waits for the store, which is away (" in told[0] and "the store folder" in told[0]
    run.stop()
    outcome = run.wait(120)
    assert outcome.reason == "stopped"
    assert outcome.status.ledger["total"]["balances"]


def test_the_evaluator_begins_once_trainer_and_a_worker_are_there(
    config: MakeConfig, running: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.fleet._OTHERS_FIRST_SECONDS", 120.0)
    run = start(config(stop_at={"updates": 10**6}), running)
    until(run, lambda status: pid_of(status, "evaluator") is not None)
    logs = run.folder.path / LOGS
    begun = {name: (logs / f"{name}.log").read_text().split(" [")[0] for name in ("trainer", "worker-0", "evaluator")}
    assert begun["evaluator"] > max(begun["trainer"], begun["worker-0"])


def test_a_role_whose_machine_is_taken_away_goes_on_in_a_new_process(config: MakeConfig, running: ExitStack) -> None:
    run = start(config(stop_at={"updates": 10**6}), running)
    for name in ("trainer", "worker-0", "evaluator"):
        before = until(run, lambda status, name=name: status.version > 2 and pid_of(status, name) is not None)  # type: ignore[misc]
        pid = pid_of(before, name)
        assert pid is not None
        os.kill(pid, signal.SIGTERM)
        after = until(run, lambda status, name=name, pid=pid: pid_of(status, name) not in (None, pid))  # type: ignore[misc]
        assert after.state == "running"
        until(run, lambda status, after=after: status.version > after.version)  # type: ignore[misc]
    told = [event.text for event in run.events() if "it goes on in a new process" in event.text]
    assert [text.partition(" ")[0] for text in told] == ["trainer", "worker-0", "evaluator"]
    assert not any("failed" in event.text for event in run.events())
    run.stop()
    outcome = run.wait(120)
    assert outcome.reason == "stopped"
    assert outcome.status.ledger["total"]["balances"]


def hanging(tally: Path, times: int) -> dict[str, Any]:
    environment = {"id": f"{MODULE}:Hangs", "kwargs": {"tally": str(tally), "times": times}, "num_envs": 2}
    return {
        "environment": environment | {"step_deadline_seconds": 3.0},
        "evaluation": {"episodes": 1, "kwargs": {"times": 0}},
    }


def test_a_worker_whose_environment_hangs_is_replaced_and_the_run_reaches_its_goal(
    config: MakeConfig, tmp_path: Path, running: ExitStack
) -> None:
    run = start(config(**hanging(tmp_path / "tally", times=1)), running)
    outcome = run.wait(120)
    assert outcome.reason == "exhausted"
    assert any("worker-0 hangs in step of its environments" in event.text for event in run.events())
    assert outcome.status.ledger["total"]["balances"]


def test_environments_that_always_hang_end_the_run_which_says_so(
    config: MakeConfig, tmp_path: Path, running: ExitStack
) -> None:
    outcome = start(config(**hanging(tmp_path / "tally", times=1000)), running).wait(150)
    assert outcome.users_fault
    assert outcome.reason.startswith("failed: environment: worker-0 hangs in step of its environments, at ")
    assert "no rollout worker is left" in outcome.reason


def at_work(status: Status) -> set[str]:
    return {beat.id for beat in status.roles if beat.role == "worker" and beat.alive and beat.progress["fragments"]}


def names(count: int) -> set[str]:
    return {f"worker-{index}" for index in range(count)}


def check_stopped(run: Run) -> None:
    run.stop()
    outcome = run.wait(120)
    assert outcome.reason == "stopped"
    assert outcome.status.ledger["total"]["balances"]
    assert not any("failed" in event.text for event in run.events())


def slow(seconds: float) -> dict[str, Any]:
    return {
        "environment": {"id": f"{MODULE}:Slow", "kwargs": {"seconds": seconds}, "num_envs": 1},
        "algorithm": {"minibatch_size": 16, "epochs": 1},
        "evaluation": {"episodes": 1, "kwargs": {"seconds": 0.0}},
        "stop_at": {"updates": 10**6},
    }


def test_auto_grows_while_the_trainer_waits_for_experience_and_says_why(config: MakeConfig, running: ExitStack) -> None:
    rollout = {"scaling": "auto", "max_workers": 2, "scaling_window_seconds": 2, "max_policy_lag": 2}
    run = start(config(**slow(0.03), rollout=rollout), running)
    two = until(run, lambda status: at_work(status) == names(2))
    assert two.desired_workers == 2
    until(run, lambda status: any("but 2 is" in event.text for event in run.events() if event.kind == "scaling"))
    told = [event.text for event in run.events() if event.kind == "scaling"]
    assert told[0].startswith("scaled 1 → 2: the trainer waited ")
    assert "for experience" in told[0]
    assert run.scale(1) == "to 1 worker"
    after = until(run, lambda status: at_work(status) == names(1))
    assert after.scaling["mode"] == "fixed"
    check_stopped(run)


def test_auto_shrinks_while_workers_wait_for_credit(config: MakeConfig, running: ExitStack) -> None:
    rollout = {"workers": 3, "scaling": "auto", "scaling_window_seconds": 2, "max_policy_lag": 2}
    busy = {"algorithm": {"minibatch_size": 4, "epochs": 20}, "stop_at": {"updates": 10**6}}
    run = start(config(**busy, rollout=rollout), running)
    until(run, lambda status: status.desired_workers == 1 and at_work(status) == names(1))
    told = [event.text for event in run.events() if event.kind == "scaling"]
    assert told[0].startswith("scaled 3 → 2: workers waited ")
    assert "for credit" in told[0]
    check_stopped(run)


def test_workers_that_are_called_back_before_they_have_left_go_on(config: MakeConfig, running: ExitStack) -> None:
    run = start(config(**slow(0.02), rollout={"fragments_per_update": 4}), running)
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
    alone = until(run, lambda status: {beat.id for beat in status.roles if beat.role == "worker"} == names(1))
    until(run, lambda status: status.version > alone.version)
    check_stopped(run)


def pending() -> int:
    actors: dict[str, Any] = ray._private.state.actors()
    return sum(actor["State"] in ("PENDING_CREATION", "DEPENDENCIES_UNREADY") for actor in actors.values())


def test_more_than_fit_are_refused_and_one_without_a_place_goes_at_once(config: MakeConfig, running: ExitStack) -> None:
    big = {"num_cpus": 30, "max_policy_lag": 1}
    with pytest.raises(UserError) as refused:
        start(config(rollout=big | {"workers": 3}), running)
    said = "3 workers with 30 CPUs each asked for; embedded Ray (1 machine, 64 CPUs by count, on "
    assert said in str(refused.value) and "; the trainer takes 1 CPU" in str(refused.value)
    assert "has room for 2: --set rollout.workers=2, or raise ray.num_cpus" in str(refused.value)
    small = config(rollout=big, stop_at={"updates": 10**6})
    assert not (small.runs_dir / "a").exists(), "nothing was written"

    run = start(small, running)
    status = until(run, lambda status: bool(status.scaling.get("room")) and status.version > 2)
    assert status.scaling["room"]["now"] == 2
    with pytest.raises(UserError, match=r"has room for 2: stagecoach scale a 2, or "):
        run.scale(3)
    assert run.status().desired_workers == 1
    run._flow().set_desired_workers(3)  # as if a machine had gone since
    until(run, lambda status: at_work(status) == names(2) and pending() == 1)
    run.scale(2)
    until(run, lambda status: pending() == 0)
    assert at_work(run.status()) == names(2)
    run._flow().set_desired_workers(3)
    until(run, lambda status: pending() == 1)
    check_stopped(run)  # whoever never had a process is not waited for
