"""`Run` from Python, all roles in this process: the API, the two transports, two agents, and that what is learnt
depends on seed and log alone: same seed, same hash; interrupted anywhere and read again, the same hash.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import redis
from rich.console import Console
from rich.panel import Panel

from coordinator.console import LiveView
from coordinator.coordinator import Coordinator, Outcome
from coordinator.run import Run
from coordinator.services import start_redis
from coordinator.status import Status
from shared.errors import CheckpointNotFound, RunExists, UserError, WaitTimeout
from shared.heartbeat import Wait
from shared.redis_keys import RunKeys
from tests.conftest import minimal_config
from tests.coordinator.terminal import Stagecoach
from tests.end_to_end.command_line import check_ledger
from tests.environments_for_tests import MODULE
from tests.support.checkpoints import upload_in
from tests.support.speed import stretched

MakeConfig = Callable[..., Any]
FOR_EVER = {"updates": 10**6}
pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def config(tmp_path: Path) -> MakeConfig:
    """`config(**sections)`: runs below the test's folder, one worker unless `rollout` says otherwise."""

    def make(**sections: Any) -> Any:
        rollout = {"workers": 1, "fragment_steps": 8, "fragments_per_update": 2} | sections.pop("rollout", {})
        evaluation = {"episodes": 1}
        return minimal_config(
            **{"runs_dir": str(tmp_path / "runs"), "rollout": rollout, "evaluation": evaluation} | sections
        )

    return make


@pytest.fixture(autouse=True)
def _no_run_outlives_its_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A run left over would go on in a thread of this process."""
    started: list[Coordinator] = []
    launch = Coordinator.launch

    def launched(*arguments: Any) -> Coordinator:
        started.append(launch(*arguments))
        return started[-1]

    monkeypatch.setattr(Coordinator, "launch", launched)
    yield
    for run in started:
        run.abandon()
        run.wait(60)


def finish(run: Run) -> Outcome:
    return run.wait(120)


def until(run: Run, done: Callable[[Status], bool]) -> Status:
    wait = Wait("what was to be seen", stretched(120))
    while not done(status := run.status()):
        wait.check()
        time.sleep(0.02)
    return status


def objects(run: Run) -> Path:
    return Path(str(run.store_location))


def weights(run: Run, name: str, policy_id: str = "default") -> str:
    """SHA-256 of a checkpoint's policy file."""
    data = (upload_in(objects(run) / "checkpoints" / name) / policy_id / "policy.safetensors").read_bytes()
    return hashlib.sha256(data).hexdigest()


def marker(run: Run, name: str) -> Any:
    return json.loads((objects(run) / name).read_text())


def test_a_run_from_start_to_end(config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")))
    every = {"transport": "object_store"}  # each version is a checkpoint; else one that still waits may be passed over
    run = Run.start(config(policy_versions=every), "a", inline=True)
    outcome = finish(run)
    assert (outcome.reason, outcome.failed) == ("exhausted", False)
    assert run.ended
    assert (outcome.status.state, outcome.status.updates, outcome.status.env_steps) == ("finished", 4, 4 * 2 * 8 * 4)
    check_ledger(marker(run, ".finished"))
    final = objects(run) / "checkpoints" / marker(run, ".finished")["final"]
    assert {str(path) for path in final.rglob("*")} < {*synced}, "before the log behind it is trimmed"

    again = Run.attach("a", run.config.runs_dir)
    assert again.config == run.config
    assert again.wait(1).reason == "exhausted"
    assert again.status() == outcome.status
    entries = again.checkpoints()
    assert [entry["version"] for entry in entries] == [0, 1, 2, 3, 4]
    assert "final" in entries[-1]["marks"]
    policy = again.load_policy()
    observation, _ = gym.make("CartPole-v1").reset(seed=1)
    assert policy.act(observation) in (0, 1)
    assert again.load_policy("2_Step-128.ckpt").version == 2
    with pytest.raises(CheckpointNotFound, match="nobody"):
        again.load_policy(policy_id="nobody")


def test_a_run_without_a_name_gets_one_that_says_what_it_is(config: MakeConfig) -> None:
    run = Run.start(config(stop_at={"updates": 1}), inline=True)
    finish(run)
    assert run.run_id.startswith("cartpole-v1-")
    assert run.folder.path.is_dir()


def test_a_live_run_is_scaled_and_stopped(config: MakeConfig) -> None:
    run = Run.start(config(stop_at=FOR_EVER, rollout={"fragments_per_update": 4}), "a", inline=True)
    other = Run.attach("a", run.config.runs_dir)
    with pytest.raises(WaitTimeout, match="run a to end"):
        other.wait(0.1)
    other.scale(3)
    three = {"worker-0", "worker-1", "worker-2"}
    until(
        other, lambda s: {b.id for b in s.roles if b.role == "worker" and b.alive} == three and three <= set(s.ledger)
    )
    other.scale(1)
    until(other, lambda s: {b.id for b in s.roles if b.role == "worker" and b.alive} == {"worker-0"})
    with pytest.raises(UserError, match="at least 1"):
        other.scale(0)
    assert not run.ended
    other.stop()
    assert finish(run).reason == "stopped"
    assert other.wait(30).reason == "stopped"
    finished = marker(run, ".finished")
    check_ledger(finished)
    assert three <= set(finished["ledger"])
    for order in (other.stop, lambda: other.scale(2)):
        with pytest.raises(UserError, match="run 'a' is not live; `stagecoach resume a`"):
            order()


def test_events_tell_what_happened(config: MakeConfig) -> None:
    run = Run.start(config(stop_at=FOR_EVER), "a", inline=True)
    until(run, lambda status: status.version > 4)
    events = run.events()
    assert {"checkpoint", "worker"} <= {event.kind for event in events}
    assert [event.id for event in run.events(events[2].id)][: len(events) - 3] == [event.id for event in events[3:]]
    run.stop()
    finish(run)
    assert run.events()[: len(events)] == events, "what was started here can be asked afterwards"
    assert run.events(events[-1].id) == run.events()[len(events) :]
    assert Run.attach("a", run.folder.path.parent).events() == []


def test_a_run_that_exists_is_not_started_again(config: MakeConfig) -> None:
    finish(Run.start(config(stop_at={"updates": 1}), "a", inline=True))
    with pytest.raises(RunExists, match="stagecoach resume a"):
        Run.start(config(seed=2), "a", inline=True)


def test_one_process_cannot_be_several_ranks(config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"trainer.ranks=2 needs as many; leave --inline out"):
        Run.start(config(trainer={"ranks": 2}), "a", inline=True)
    assert not (tmp_path / "runs" / "a").exists()


def test_the_same_seed_gives_the_same_weights_and_another_gives_others(config: MakeConfig) -> None:
    runs = {}
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        runs[name] = Run.start(config(seed=seed), name, inline=True)
        finish(runs[name])
    last = {name: weights(run, marker(run, ".finished")["final"]) for name, run in runs.items()}
    assert last["a"] == last["b"]
    assert last["a"] != last["c"]


def test_the_transport_changes_nothing_that_is_learnt(config: MakeConfig) -> None:
    last = []
    for transport in ("redis", "object_store"):
        run = Run.start(config(policy_versions={"transport": transport}), transport.replace("_", "-"), inline=True)
        assert finish(run).reason == "exhausted"
        check_ledger(marker(run, ".finished"))
        last.append(weights(run, marker(run, ".finished")["final"]))
    assert last[0] == last[1]


def board_version(run: Run) -> int:
    """The newest version that an interrupted run's own Redis knows."""
    _, secrets = run.folder.credentials(run.config)
    folder = run.folder.path
    service = start_redis(folder / "redis", folder / "logs" / "redis.log", secrets["redis_password"])
    try:
        with redis.Redis(port=service.port, password=secrets["redis_password"]) as client:
            return int(str(client.hget(RunKeys(run.run_id).flow, "version").decode()))
    finally:
        service.stop()


def test_a_run_that_is_interrupted_arrives_at_the_same_weights(config: MakeConfig) -> None:
    """Abandoned far behind its only checkpoint, it reads the log again: every version as in a run without a break."""
    broken = Run.start(config(checkpoint={"every": "1000 updates"}, stop_at=FOR_EVER), "broken", inline=True)
    until(broken, lambda status: status.version >= 6)
    broken.abandon()
    assert finish(broken).reason == "abandoned"
    assert Run.attach("broken", broken.config.runs_dir).status().state == "interrupted"
    assert marker(broken, ".checkpoint")["latest"] == "0_Step-0.ckpt"
    version = board_version(broken)
    assert version >= 6

    resumed = Run.resume("broken", broken.config.runs_dir, (f"stop_at.updates={version}",), inline=True)
    assert finish(resumed).reason == "exhausted"
    finished = marker(resumed, ".finished")
    assert finished["version"] == version
    check_ledger(finished)

    whole = Run.start(config(stop_at={"updates": version}), "whole", inline=True)
    finish(whole)
    assert weights(resumed, finished["final"]) == weights(whole, finished["final"])


def test_a_stopped_run_goes_on_where_it_was(config: MakeConfig) -> None:
    first = Run.start(config(stop_at={"updates": 3}), "a", inline=True)
    before = finish(first).status
    with pytest.raises(UserError, match=r"3 updates and stop_at\.updates=3, so it would end at once"):
        Run.resume("a", first.config.runs_dir, inline=True)
    assert finish(Run.attach("a", first.config.runs_dir)).reason == "exhausted"
    second = Run.resume("a", first.config.runs_dir, ("stop_at.updates=7", "rollout.workers=2"), inline=True)
    after = finish(second).status
    assert (before.version, after.version, after.updates) == (3, 7, 7)
    assert after.episodes >= before.episodes
    finished = marker(second, ".finished")
    check_ledger(finished)
    assert finished["ledger"]["worker-1"]["consumed"]["fragments"] > 0
    assert Run.attach("a", first.config.runs_dir).config.stop_at.updates == 7, "what was changed is kept"


def test_what_decides_the_learning_is_not_changed_by_a_resume(config: MakeConfig) -> None:
    run = Run.start(config(), "a", inline=True)
    finish(run)
    with pytest.raises(UserError, match="start a new run"):
        Run.resume("a", run.config.runs_dir, ("algorithm.gamma=0.5", "stop_at.updates=9"), inline=True)
    assert marker(run, ".finished")["reason"] == "exhausted"


def test_two_agents_train_two_policies(config: MakeConfig) -> None:
    run = Run.start(
        config(
            environment={"id": f"{MODULE}:Chase", "api": "pettingzoo", "num_envs": 4},
            policies={"hunter": {}, "prey": {"normalise_observations": True}},
            agents={"cat": "hunter", "mouse": "prey"},
        ),
        "a",
        inline=True,
    )
    assert finish(run).reason == "exhausted"
    finished = marker(run, ".finished")
    assert all(line["balances"] for line in finished["ledger"].values())
    first, last = "0_Step-0.ckpt", finished["final"]
    for policy_id in ("hunter", "prey"):
        assert weights(run, first, policy_id) != weights(run, last, policy_id)
    assert weights(run, last, "hunter") != weights(run, last, "prey")
    hunter, prey = (run.load_policy(last, policy_id) for policy_id in ("hunter", "prey"))
    assert hunter.act([1.0, 2.0, 0.5]) in (0, 1)
    assert prey.act([1.0, 2.0]).shape == (1,)


def test_a_run_whose_environment_fails_has_an_end(config: MakeConfig) -> None:
    environment = {"id": f"{MODULE}:Counting", "kwargs": {"fails": "step", "fails_at": 1}, "num_envs": 4}
    outcome = finish(Run.start(config(environment=environment), "a", inline=True))
    assert outcome.failed
    assert "raised ValueError in step: the gripper is stuck" in outcome.reason
    status = Run.attach("a", config().runs_dir).status()
    assert status.state == "finished"
    assert "the gripper is stuck" in status.reason
    assert "\n" not in outcome.reason + status.reason
    assert "Traceback" in (config().runs_dir / "a" / "logs" / "coordinator.log").read_text()


def test_an_environment_that_fails_now_and_then_does_not_end_the_run(config: MakeConfig, tmp_path: Path) -> None:
    environment = {
        "id": f"{MODULE}:FailsAFewTimes", "kwargs": {"tally": str(tmp_path / "tally"), "times": 2}, "num_envs": 4,
    }  # fmt: skip
    run = Run.start(config(environment=environment), "a", inline=True)
    assert finish(run).reason == "exhausted"
    assert (tmp_path / "tally").read_text() == "xx"
    check_ledger(marker(run, ".finished"))


def test_ctrl_c_is_said_to_end_the_watching_where_it_does(
    config: MakeConfig, stagecoach: Stagecoach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a terminal; the run goes on, which `train`'s own view would end."""
    made, screen = config(stop_at=FOR_EVER), io.StringIO()
    monkeypatch.setattr("coordinator.cli_live.console", Console(file=screen, force_terminal=True, width=120))
    run = Run.start(made, "a", inline=True)
    shown = LiveView._panel

    def interrupted(view: LiveView) -> Panel:
        if "Ctrl-C" in screen.getvalue():
            raise KeyboardInterrupt
        return shown(view)

    monkeypatch.setattr(LiveView, "_panel", interrupted)
    assert stagecoach("watch", "a", "--runs-dir", str(made.runs_dir)).code == 0
    assert "Ctrl-C ends the watching, not the run" in screen.getvalue()
    assert "watching ended; the run goes on" in screen.getvalue()
    assert "last checkpoint" not in screen.getvalue()
    assert run.live


def test_an_interrupted_run_is_not_resumed_for_a_goal_that_it_has_passed(config: MakeConfig) -> None:
    made = config(stop_at=FOR_EVER, checkpoint={"every": "2 updates"})
    run = Run.start(made, "a", inline=True)
    until(run, lambda status: status.updates > 6 and status.latest not in (None, "0_Step-0.ckpt"))
    run.abandon()
    assert run.wait(60).reason == "abandoned"
    with pytest.raises(UserError, match=r"the run has \d+ updates and stop_at\.updates=1, so it would end at once"):
        Run.resume("a", made.runs_dir, ("stop_at.updates=1",), inline=True)


def test_a_resumed_run_reads_all_again_that_was_learnt_before_it_ends(config: MakeConfig) -> None:
    """Checkpoints are rare: most of what was learnt lies in the log only when the run is cut off."""
    made = config(stop_at=FOR_EVER, checkpoint={"every": "1000 updates"})
    run = Run.start(made, "a", inline=True)
    until(run, lambda status: status.version >= 6)
    run.abandon()
    assert run.wait(60).reason == "abandoned"
    again = Run.resume("a", made.runs_dir, ("stop_at.updates=3",), inline=True)
    outcome = again.wait(60)
    assert outcome.reason == "exhausted"
    assert outcome.status.version >= 6
    total = outcome.status.ledger["total"]
    assert total["balances"]
    assert total["consumed"]["transitions"] == outcome.status.env_steps
