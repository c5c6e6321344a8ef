"""`Run` from Python, all roles in this process: the API, the two transports, two agents, and that what is learned
depends on seed and log alone: same seed, same hash; interrupted anywhere and read again, the same hash.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from rich.panel import Panel

from stagecoach.coordinator.catalog.status import Status
from stagecoach.coordinator.cli.terminal.console import PrintableConsole
from stagecoach.coordinator.cli.terminal.live_view import LiveView, print_status, print_summary
from stagecoach.coordinator.lifecycle.supervisor import Outcome
from stagecoach.coordinator.run_access.run import Run
from stagecoach.shared.base.errors import CheckpointDamaged, CheckpointNotFound, UserError, WaitTimeout
from stagecoach.shared.experience.checkpoint_name import checkpoint_name, checkpoint_version
from stagecoach.shared.protocol import payload_shards
from stagecoach.shared.protocol.shared_memory import SharedMemory
from stagecoach.shared.storage.checkpoint_store import Checkpoint
from stagecoach.shared.storage.due_evaluations import read_due_evaluation
from stagecoach.shared.storage.metric_log import ENV_STEPS, TRAIN, Rows, read
from stagecoach.shared.storage.object_store import ObjectStore
from tests.support.environments.games import MODULE, Nim
from tests.support.processes.command_line import Stagecoach, check_ledger, contents, until
from tests.support.runs.checkpoints import upload_in
from tests.support.suite.groups import some_quick

MakeConfig = Callable[..., Any]
FOR_EVER = {"updates": 10**6}
pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("no_run_left")]


def finish(run: Run, reason: str = "exhausted") -> Outcome:
    outcome = run.wait(120)
    assert outcome.reason == reason
    return outcome


def objects(run: Run) -> Path:
    return Path(str(run.store_location))


def weights(run: Run, name: str, policy_id: str = "default") -> str:
    """SHA-256 of a checkpoint's policy file."""
    data = (upload_in(objects(run) / "checkpoints" / name) / policy_id / "policy.safetensors").read_bytes()
    return hashlib.sha256(data).hexdigest()


def marker(run: Run, name: str) -> Any:
    return json.loads((objects(run) / name).read_text())


def test_run_from_start_to_end(config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")))
    every = {"transport": "object_store"}  # each version is a checkpoint; else one that still waits may be passed over
    run = Run.start(config(policy_versions=every), "a", inline=True)
    outcome = finish(run)
    assert run.ended and not outcome.failed
    assert (outcome.status.state, outcome.status.updates, outcome.status.env_steps) == ("finished", 4, 4 * 2 * 8 * 4)
    check_ledger(marker(run, ".finished"))
    final = objects(run) / "checkpoints" / marker(run, ".finished")["final"]
    assert {str(path) for path in final.rglob("*")} < {*synced}, "before the log behind it is trimmed"

    again = Run.attach("a", run.config.runs_dir)
    assert again.config == run.config
    assert finish(again).status == again.status() == outcome.status
    entries = again.checkpoints()
    assert [entry["version"] for entry in entries] == [0, 1, 2, 3, 4]
    assert "final" in entries[-1]["marks"]
    policy = again.policy()
    observation, _ = gym.make("CartPole-v1").reset(seed=1)
    assert policy.act(observation) in (0, 1)
    assert again.policy("2_Step-128.ckpt").version == 2
    with pytest.raises(CheckpointNotFound, match="nobody"):
        again.policy(policy_id="nobody")


def test_shared_memory_is_optional_and_changes_no_weight(config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload_shards, "AT_LEAST", 1)
    put, shared, hashes = SharedMemory.put, list[str](), set[str]()

    def recorded(memory: SharedMemory, name: str, body: bytes) -> bool:
        shared.append(name)
        return put(memory, name, body)

    monkeypatch.setattr(SharedMemory, "put", recorded)
    for on, fragments in ((False, 0), (True, 8)):
        run = Run.start(config(redis={"shared_memory": on}), f"shared-{on}", inline=True)
        finish(run)
        assert (len({*shared}) >= fragments) and bool(shared) == on
        hashes.add(weights(run, marker(run, ".finished")["final"]))
    assert len(hashes) == 1


def test_live_run_is_scaled_stopped_and_emits_events(config: MakeConfig) -> None:
    run = Run.start(config(stop_at=FOR_EVER, rollout={"fragments_per_update": 4}), "a", inline=True)
    other = Run.attach("a", run.config.runs_dir)
    with pytest.raises(WaitTimeout, match="run a to end"):
        other.wait(0.1)
    other.scale(3)
    three = {"worker-0", "worker-1", "worker-2"}

    def alive(status: Status) -> set[str]:
        return {beat.id for beat in status.roles if beat.role == "worker" and beat.alive}

    until(other, lambda status: alive(status) == three <= set(status.ledger))
    other.scale(1)
    until(other, lambda status: alive(status) == {"worker-0"} and status.version > 4)
    events = run.events()
    assert {"checkpoint", "worker"} <= {event.kind for event in events}
    assert [event.id for event in run.events(events[2].id)][: len(events) - 3] == [event.id for event in events[3:]]
    assert not run.ended
    other.stop()
    finish(run, "stopped")
    finish(other, "stopped")
    finished = marker(run, ".finished")
    check_ledger(finished)
    assert three <= set(finished["ledger"])
    assert run.events()[: len(events)] == events, "what was started here can be asked afterwards"
    assert run.events(events[-1].id) == run.events()[len(events) :]
    assert other.events() == run.events()


def test_run_without_evaluation_has_no_evaluator(config: MakeConfig) -> None:
    run = Run.start(config(evaluation={"episodes": 0}, stop_at={"updates": 2}), "a", inline=True)
    outcome = finish(run)
    screen = PrintableConsole(file=io.StringIO(), width=200)
    print_summary(run, outcome, screen)
    print_status(run, run.status(), screen)
    assert "has no score, with evaluation.episodes=0" in screen.file.getvalue()  # type: ignore[attr-defined]
    assert "none (evaluation.episodes=0)" in screen.file.getvalue()  # type: ignore[attr-defined]
    assert not outcome.status.evaluates and not any(event.kind == "evaluation" for event in run.events())
    assert run.status().as_dict()["evaluates"] is False


@pytest.mark.parametrize("every", ["1 updates", "100 env_steps"])
def test_inline_all_that_is_due_is_played_before_the_end(
    config: MakeConfig, every: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that are seen while they are being written."""
    tries: list[str] = []

    def torn_at_first(store: ObjectStore, name: str) -> Checkpoint:
        tries.append(name)
        if name.startswith(("2_", "3_")) and tries.count(name) == 1:
            raise CheckpointDamaged("it is empty")
        return read_due_evaluation(store, name)

    monkeypatch.setattr("stagecoach.rollout_worker.evaluator.read_due_evaluation", torn_at_first)
    run = Run.start(
        config(evaluation={"episodes": 1, "every": every}, checkpoint={"every": "9 updates"}), "a", inline=True
    )
    status = finish(run).status
    rows = Rows.joined(list(run.metrics("evaluations")))
    due = [1.0, 2.0, 3.0, 4.0] if every == "1 updates" else [2.0, 4.0]
    assert {*due} <= {*rows.columns["policy/version"]}
    assert status.test_episodes == rows.columns["time/test_episodes"][-1] > 0
    assert status.as_dict()["test_env_steps"] == rows.columns["time/test_env_steps"][-1]
    assert not [event for event in run.events() if "had not been played" in event.text]


def test_inline_refuses_several_ranks(config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"trainer.ranks=2 needs a process each; leave --inline out"):
        Run.start(config(trainer={"ranks": 2}), "a", inline=True)
    assert not (tmp_path / "runs" / "a").exists()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"id": "CartPole-v1", "action_mask": "info"},
            r"environment.action_mask=info expects info\['action_mask'\] with 2 numbers, found none",
        ),
        ({"id": f"{MODULE}:Nim", "api": "pettingzoo"}, "an action_mask without a legal action in 1 of 1 steps"),
    ],
)
def test_missing_mask_is_refused_before_start(
    config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(Nim, "legal", lambda self: np.zeros(3, np.int8))
    with pytest.raises(UserError, match=message):
        Run.start(config(environment=environment), "a", inline=True)
    assert not (tmp_path / "runs" / "a").exists()


def test_weights_depend_on_seed_not_transport(config: MakeConfig) -> None:
    cases: dict[str | None, dict[str, Any]] = {
        "a": {"seed": 3}, "b": {"seed": 3}, "c": {"seed": 3, "policy_versions": {"transport": "object_store"}},
        None: {"seed": 4},
    }  # fmt: skip
    last = []
    for name, sections in cases.items():
        run = Run.start(config(**sections), name, inline=True)
        finish(run)
        check_ledger(marker(run, ".finished"))
        last.append(weights(run, marker(run, ".finished")["final"]))
    assert last[0] == last[1] == last[2] != last[3]
    assert run.run_id.startswith("cartpole-v1-") and run.folder.path.is_dir(), "without a name it gets one"


def test_interrupted_run_rereads_to_same_weights(config: MakeConfig) -> None:
    """Most of what was learned lies in the log only; it is read before the run ends, although its goal is passed."""
    broken = Run.start(config(checkpoint={"every": "1000 updates"}, stop_at=FOR_EVER), "broken", inline=True)
    until(broken, lambda status: status.version >= 6)
    broken.abandon()
    finish(broken, "abandoned")
    assert Run.attach("broken", broken.config.runs_dir).status().state == "interrupted"
    assert marker(broken, ".checkpoint")["latest"] == "0_Step-0.ckpt"

    resumed = Run.resume("broken", broken.config.runs_dir, ("stop_at.updates=3",), inline=True)
    finish(resumed)
    finished = marker(resumed, ".finished")
    assert finished["version"] >= 6
    check_ledger(finished)
    whole = Run.start(config(stop_at={"updates": finished["version"]}), "whole", inline=True)
    finish(whole)
    assert weights(resumed, finished["final"]) == weights(whole, finished["final"])


def test_stopped_run_resumes(config: MakeConfig) -> None:
    first = Run.start(config(stop_at={"updates": 3}), "a", inline=True)
    before = finish(first).status
    with pytest.raises(UserError, match=r"3 updates and stop_at\.updates=3, so it would end at once"):
        Run.resume("a", first.config.runs_dir, inline=True)
    finish(Run.attach("a", first.config.runs_dir))
    second = Run.resume("a", first.config.runs_dir, ("stop_at.updates=7", "rollout.workers=2"), inline=True)
    after = finish(second).status
    assert (before.version, after.version, after.updates) == (3, 7, 7)
    assert after.episodes >= before.episodes
    finished = marker(second, ".finished")
    check_ledger(finished)
    assert finished["ledger"]["worker-1"]["consumed"]["fragments"] > 0
    assert Run.attach("a", first.config.runs_dir).config.stop_at.updates == 7, "what was changed is kept"


def test_ctrl_c_is_said_to_end_the_watching_where_it_does(
    config: MakeConfig, stagecoach: Stagecoach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a terminal; the run goes on, which `train`'s own view would end."""
    made, screen = config(stop_at=FOR_EVER), io.StringIO()
    terminal = PrintableConsole(file=screen, force_terminal=True, width=120)
    monkeypatch.setattr("stagecoach.coordinator.cli.foreground.console", terminal)
    run = Run.start(made, "a", inline=True)
    shown = LiveView.panel

    def interrupted(view: LiveView) -> Panel:
        if "Ctrl-C" in screen.getvalue():
            raise KeyboardInterrupt
        return shown(view)

    monkeypatch.setattr(LiveView, "panel", interrupted)
    assert stagecoach("watch", "a", "--runs-dir", str(made.runs_dir)).code == 0
    assert "Ctrl-C ends the watching, not the run" in screen.getvalue()
    assert "watching ended; the run continues" in screen.getvalue()
    assert "last checkpoint" not in screen.getvalue()
    assert run.live


def test_resume_refuses_reached_goal(config: MakeConfig) -> None:
    made = config(stop_at=FOR_EVER, checkpoint={"every": "2 updates"})
    run = Run.start(made, "a", inline=True)
    until(run, lambda status: status.updates > 6 and status.latest not in (None, "0_Step-0.ckpt"))
    run.abandon()
    finish(run, "abandoned")
    with pytest.raises(UserError, match=r"the run has \d+ updates and stop_at\.updates=1, so it would end at once"):
        Run.resume("a", made.runs_dir, ("stop_at.updates=1",), inline=True)


def curve(run: Run) -> list[float]:
    """The env steps of all rows of training."""
    found = read(run.checkpoint_store().store, TRAIN)
    return [row[ENV_STEPS] for _, rows in found for _, row in rows.named()]


@pytest.mark.parametrize("archive", some_quick(["all", "off"], "all"))
def test_rollback_restores_whole_replay_buffer_or_nothing(config: MakeConfig, archive: str) -> None:
    """The buffer of four fragments has long forgotten what it held at version 5."""
    old = checkpoint_name(5, 80)
    made = config(
        environment={"id": "CartPole-v1", "num_envs": 2}, rollout={"fragments_per_update": 1}, stop_at={"updates": 5},
        algorithm={"name": "dqn", "replay_buffer": {"kind": "uniform", "capacity": 64}, "minibatch_size": 8},
        checkpoint={"every": "5 updates", "keep_last": 1, "keep_every": 5},
        archive={"keep": archive, "segment_bytes": 1024},
    )  # fmt: skip
    finish(Run.start(made, "a", inline=True))  # so that it has this checkpoint, however slow the disk is
    run = Run.resume("a", made.runs_dir, ("stop_at.updates=40",), inline=True)
    finish(run)
    names = [entry["name"] for entry in run.checkpoints()]
    assert old in names
    if archive == "all":
        outcome = finish(Run.resume("a", made.runs_dir, ("stop_at.updates=12",), inline=True, origin=old))
        assert outcome.status.ledger["total"]["balances"]
        assert curve(run) == [16 * update for update in range(1, 13)]
        newest = max(names, key=lambda name: checkpoint_version(name) or 0)
        finish(Run.resume("a", made.runs_dir, ("stop_at.updates=42",), inline=True, origin=newest))
        assert curve(run) == [16 * update for update in range(1, 43)], "the first line again"
        return
    before = contents(objects(run))
    with pytest.raises(UserError, match=rf"resume --from {old}: .*nothing was changed; choose another checkpoint"):
        Run.resume("a", made.runs_dir, ("stop_at.updates=50",), inline=True, origin=old)
    assert contents(objects(run)) == before


def test_environment_that_ends_a_child_process_lets_a_run_end(stagecoach: Stagecoach) -> None:
    """The child would inherit the handlers of the command line, by which it ignores `terminate()`."""
    environment = "environment={id: 'tests.support.environments.small:StartsAChild', num_envs: 2}"
    ended = stagecoach("train", "config.yaml", "--inline", "--run-id", "a", "--set", environment)
    assert ended.code == 0 and " scores " in ended.out, ended


def test_close_that_hangs_is_reported_and_given_up_inline(config: MakeConfig, tmp_path: Path) -> None:
    """The child ignores `terminate()`, and `close` waits for it."""
    kwargs = {"stubborn": str(tmp_path / "stubborn")}
    environment = {"id": "tests.support.environments.small:StartsAChild", "num_envs": 2, "kwargs": kwargs}
    environment |= {"step_deadline_seconds": 1.0}
    begun = (tmp_path / "stubborn").touch
    run = Run.start(config(environment=environment, stop_at={"updates": 2}), "a", inline=True, begun=begun)
    finish(run)
    told = [event.text for event in run.events()]
    for who in ("evaluator", "worker-0"):
        assert any(text.startswith(f"{who} hangs in close of its environments, at ") for text in told), told
    assert any(" scores " in text for text in told)
