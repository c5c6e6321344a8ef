"""The trainer with a real Redis, a folder store and a real worker, stepped in turn: same log, same weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from stagecoach.shared.base.errors import CheckpointDamaged, ConfigError, StoreUnavailable, UserError, WeightsNotFinite
from stagecoach.shared.experience.log_entry import LogEntry
from stagecoach.shared.policies.serialization import state_arrays
from stagecoach.shared.protocol.events import read_events, record_evaluation
from stagecoach.shared.protocol.experience_log import ExperienceLog
from stagecoach.shared.protocol.flow_control import RunState
from stagecoach.shared.protocol.heartbeat import Heartbeat
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.storage.checkpoint_store import CHECKPOINTS
from stagecoach.trainer_node import trainer
from stagecoach.trainer_node.recovery.incarnation import Incarnation
from stagecoach.trainer_node.recovery.recovery import Recovery
from stagecoach.trainer_node.trainer import Trainer
from tests.support.runs.game import (
    POLICY,
    STEPS_PER_UPDATE,
    NewGame,
    archived,
    balanced,
    damage,
    ends_with,
    replayed,
    small,
)  # fmt: skip

# Same log, same weights


def test_seed_decides_weights(new_game: NewGame) -> None:
    one, same, other = (ends_with(new_game(small(seed=seed))) for seed in (3, 3, 4))
    assert one == same and all(other[name] != one[name] for name in one)


@pytest.mark.parametrize("crash_at", [1, 2, 3, 5])
def test_trainer_crash_changes_no_weight_and_republishes_nothing(new_game: NewGame, crash_at: int) -> None:
    unbroken, broken = new_game(small()), new_game(small())
    expected = unbroken.finish()
    broken.play_to(crash_at)
    broken.worker.step(0)  # one more fragment in the log, of an update that this trainer never makes
    broken.crash()
    before = broken.role.redis.hgetall(RunKeys(broken.role.run_id).board)
    broken.restart()
    assert broken.role.redis.hgetall(RunKeys(broken.role.run_id).board) == before
    while broken.trainer.version < crash_at:
        assert broken.trainer.step(0) == "updated"
        assert broken.role.redis.hgetall(RunKeys(broken.role.run_id).board) == before, "known versions stay as they are"
    assert broken.finish() == expected
    assert broken.finished()["counters"] == unbroken.finished()["counters"]
    assert balanced(broken)["total"]["consumed"] == {"fragments": 12, "transitions": 6 * STEPS_PER_UPDATE}
    state = broken.role.flow.read()
    assert (state.version, state.consumed, state.epoch) == (6, 12, 2)


def test_object_store_transport_gives_equal_weights(new_game: NewGame) -> None:
    through_redis, through_store = (
        new_game(small(policy_versions={"transport": transport}, checkpoint={"every": "1 updates", "keep_last": 2}))
        for transport in ("redis", "object_store")
    )
    through_store.play_to(3)
    board: Any = through_store.role.redis.hgetall(RunKeys(through_store.role.run_id).board)
    assert board[b"blob"] == b"" and board[b"checkpoint"].decode() == f"3_Step-{3 * STEPS_PER_UPDATE}.ckpt"
    through_store.replace_trainer()
    assert through_store.finish() == through_redis.finish()
    balanced(through_store)


def test_run_at_its_bound_ends_with_final_checkpoint_and_ledger(new_game: NewGame) -> None:
    """Evaluations are counted apart from training."""
    game = new_game(small(stop_at={"updates": 3}))
    for version in (0, 2):
        played = {"version": version, "mean_return": 1.0, "episodes": 4, "env_steps_played": 50}
        record_evaluation(game.role.redis, game.role.run_id, f"{version}_Step-{64 * version}.ckpt", played)
    game.finish()
    content = game.finished()
    counters = content["counters"]
    final = f"3_Step-{3 * STEPS_PER_UPDATE}.ckpt"
    assert content["reason"] == "exhausted" and content["final"] == final and content["version"] == 3
    assert content["run_id"] == game.role.run_id and content["time"] > 0
    assert (counters["train"]["updates"], counters["train"]["env_steps"]) == (3, 3 * STEPS_PER_UPDATE)
    assert counters["test"] == {"env_steps": 100, "episodes": 8} and counters["heatup"]["env_steps"] == 0
    assert content["ledger"] == balanced(game)
    pointer = game.role.checkpoints.pointer()
    assert pointer is not None and pointer.final == pointer.latest == final
    assert game.role.flow.read().state == "finished"
    assert game.worker.step(0) == "finished"


def test_event_says_that_no_evaluator_starts(new_game: NewGame, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "_REPLACED_SECONDS", 0.5)
    game = new_game(small(stop_at={"updates": 3}))
    client, run_id, last = game.role.redis, game.role.run_id, f"3_Step-{3 * STEPS_PER_UPDATE}.ckpt"
    coordinator = Heartbeat(client, run_id, "coordinator", "coordinator")
    coordinator.start()
    game.finish()
    coordinator.stop("")
    said = f"{last} is not evaluated: no evaluator is running"
    assert said in [event.text for event in read_events(client, run_id)]


def test_stop_during_replay_ends_at_published_version(new_game: NewGame) -> None:
    expected = new_game(small(stop_at={"updates": 5})).finish()
    game = new_game(small())
    game.play_to(5)
    game.replace_trainer()
    assert game.trainer.version < 5
    assert game.role.flow.set_state(RunState.STOPPING, "stopped", expected=RunState.RUNNING)
    assert game.finish() == expected
    assert (game.finished()["reason"], game.finished()["version"]) == ("stopped", 5)
    balanced(game)


def test_checkpoints_name_their_parents_and_their_range(new_game: NewGame, monkeypatch: pytest.MonkeyPatch) -> None:
    game = new_game(small(stop_at={"updates": 4}))
    read, ids = ExperienceLog.read, list[str]()

    def noted(log: ExperienceLog, *args: Any) -> list[LogEntry]:
        """As the trainer reads them: its publisher trims them soon afterwards."""
        found = read(log, *args)
        ids.extend(entry.id for entry in found if entry.id not in ids)
        return found

    monkeypatch.setattr(ExperienceLog, "read", noted)
    log = ExperienceLog(game.role.redis, game.role.run_id)
    for version in range(1, 5):
        game.play_to(version, durable=True)
    manifests = [game.role.checkpoints.manifest(name) for name in game.role.checkpoints.names()]
    assert [(item.version, item.parent) for item in manifests] == [
        (0, None), (2, manifests[0].name), (4, manifests[1].name)
    ]  # fmt: skip
    assert [item.log_position for item in manifests] == ["0-0", ids[3], ids[7]]
    assert manifests[2].provenance["log_range"] == [ids[3], ids[7]]
    assert manifests[2].provenance["policy_versions"] == [2, 4]
    assert game.role.flow.read().trimmed_id == ids[7] and len(log) == 0
    for item in manifests:  # the equation, at every checkpoint
        accounting = item.provenance["accounting"]
        assert all(line["balances"] for line in accounting.values())
        assert accounting["total"]["produced"]["fragments"] >= 2 * item.version
    game.finish()
    assert game.role.checkpoints.manifest(manifests[2].name) == manifests[2], "the last one is the one that was due"


# What it refuses


def test_infinite_weights_fail_run_and_are_never_stored(new_game: NewGame) -> None:
    game = new_game(small(algorithm={"minibatch_size": 32, "epochs": 2, "learning_rate": 1e30}))
    with pytest.raises(WeightsNotFinite, match=r"left infinite or NaN weights in default.*learning_rate") as caught:
        game.finish()
    game.trainer.incarnation.fail(caught.value)
    content = game.finished()
    assert content["reason"].startswith("failed: update ") and "learning_rate" in content["reason"]
    assert content["final"] is None
    assert (game.role.flow.read().state, game.role.flow.read().reason) == ("finished", content["reason"])
    board, names = game.board(), game.role.checkpoints.names()
    assert names
    for weights in (board.states["default"], *map(game.weights, names)):  # a normalizer's bound begins as infinite
        assert all(np.isfinite(array).all() for name, array in weights.items() if not name.endswith(".bound"))
    assert game.worker.step(0) == "finished"


def test_reward_beyond_bound_drops_fragment_and_run_continues(new_game: NewGame) -> None:
    environment = {"id": "tests.support.environments.small:Hostile", "num_envs": 4}
    game = new_game(small(environment=environment, policies={"default": {"hidden_sizes": [8]}}))
    game.finish()
    assert game.finished()["reason"] == "exhausted"
    assert list(balanced(game)["total"]["dropped"]) == ["magnitude"]
    told = game.events("dropped")
    assert told.count("is magnitude") == 1 and "3e+38" in told


def test_warm_up_trains_normalizer_and_no_weight(new_game: NewGame) -> None:
    game = new_game(
        small(heatup=f"{2 * STEPS_PER_UPDATE} env_steps", checkpoint={"every": "1 updates", "keep_last": 9})
    )
    game.play_to(2)
    counters = game.trainer.learner.counters
    assert (counters.heatup.env_steps, counters.heatup.updates) == (2 * STEPS_PER_UPDATE, 0)
    assert (counters.train.env_steps, counters.train.updates, counters.train.episodes) == (0, 0, 0)
    before, after = game.weights("0_Step-0.ckpt"), state_arrays(game.trainer.learner.policies["default"])
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed and all(name.startswith("normalizer.") for name in changed)
    game.finish()
    content = game.finished()
    assert content["counters"]["heatup"]["env_steps"] == 2 * STEPS_PER_UPDATE
    assert content["counters"]["train"] | {"episodes": 0, "gradient_steps": 0} == {
        "env_steps": 6 * STEPS_PER_UPDATE, "updates": 6, "episodes": 0, "gradient_steps": 0
    }  # fmt: skip
    assert content["version"] == 8
    balanced(game)


def test_damaged_checkpoint_rolls_back_to_the_one_before(new_game: NewGame) -> None:
    game = new_game(archived())
    game.play_to(5, durable=True)
    newest, before = f"4_Step-{4 * STEPS_PER_UPDATE}.ckpt", f"2_Step-{2 * STEPS_PER_UPDATE}.ckpt"
    game.crash()
    damage(game, newest)
    game.restart()
    said = game.events("trainer")
    assert f"{newest}/{POLICY} was altered" in said and f"going back to {before}" in said
    assert "trimmed: continues as version 6" in said
    assert game.board_version() == game.role.flow.read().version == 6
    restarted, old = state_arrays(game.trainer.learner.policies["default"]), game.weights(before)
    assert all(np.array_equal(restarted[name], old[name]) for name in old)
    game.finish()
    final = game.finished()["final"]
    assert game.latest().manifest.name == final and game.latest().manifest.version > 6
    with pytest.raises(UserError, match=r"is not in the lineage of .* version 6 or later"):
        replayed(game, before, final)
    (continued,) = (name for name in game.role.checkpoints.names() if name.startswith("6_"))
    assert replayed(game, continued, final).equal
    balanced(game)


def test_damaged_checkpoint_is_rebuilt_from_the_log(new_game: NewGame, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = new_game(small()).finish()
    game = new_game(small())
    with monkeypatch.context() as patch:  # the trainer dies between the checkpoint and the trim
        patch.setattr(ExperienceLog, "trim", lambda *_: 0)
        game.play_to(5)
        game.crash()
    damaged = f"4_Step-{4 * STEPS_PER_UPDATE}.ckpt"
    damage(game, damaged)
    with pytest.raises(CheckpointDamaged):
        game.role.checkpoints.load(damaged)
    game.restart()
    assert game.trainer.version == 2
    game.play_to(5)
    game.durable()  # a later one would be written in its place where the store is slow
    assert game.finish() == expected
    assert game.role.checkpoints.load(damaged).manifest.version == 4
    assert "reading the log again up to version 5" in game.events("trainer")
    balanced(game)


def test_trainer_refuses_run_without_readable_checkpoint(new_game: NewGame) -> None:
    game = new_game(small())
    game.play_to(3, durable=True)
    game.crash()
    for name in game.role.checkpoints.names():
        damage(game, name)
    store = game.role.checkpoints.store
    before = {key: store.get(key) for key in store.keys("")}
    with pytest.raises(CheckpointDamaged, match="no usable checkpoint"):
        game.restart()
    game.crash()
    for name in game.role.checkpoints.names():
        game.role.checkpoints.delete(name)
    with pytest.raises(StoreUnavailable, match="has published policies, but the store holds no checkpoint of it"):
        game.restart()
    assert {key: store.get(key) for key in store.keys("")} == {
        key: data for key, data in before.items() if not key.startswith(CHECKPOINTS)
    }
    assert game.board_version() == 3


def test_checkpoint_order_waits_until_something_is_learned(new_game: NewGame, monkeypatch: pytest.MonkeyPatch) -> None:
    """An order that comes while the trainer recovers counts too."""
    begin = Recovery.start
    with monkeypatch.context() as patch:
        patch.setattr(Recovery, "start", lambda inc: (begin(inc), inc.role.flow.order_checkpoint())[0])
        game = new_game(small(checkpoint={"every": "100 updates"}))
    assert game.trainer.step(0) == "waited"
    assert game.role.checkpoints.names() == ["0_Step-0.ckpt"]
    game.play_to(3, durable=True)
    made = ["0_Step-0.ckpt", f"1_Step-{STEPS_PER_UPDATE}.ckpt"]
    assert game.role.checkpoints.names() == made
    game.role.redis.hset(RunKeys(game.role.run_id).flow, "checkpoint_orders", 0)  # as in a Redis that was rolled back
    game.play_to(4)
    game.role.flow.order_checkpoint()
    game.play_to(5, durable=True)
    assert game.role.checkpoints.names() == [*made, f"4_Step-{4 * STEPS_PER_UPDATE}.ckpt"]


def test_last_checkpoint_names_its_parent_when_due(new_game: NewGame, monkeypatch: pytest.MonkeyPatch) -> None:
    game = new_game(small(stop_at={"updates": 4}))
    game.play_to(3, durable=True)
    with monkeypatch.context() as patch:  # the store takes its time: the due one still waits when the last one comes
        patch.setattr(game.trainer.state.writer, "submit", lambda snapshot: None)
        game.play_to(4)
    game.finish()
    manifest = game.latest().manifest
    assert manifest.version == 4 and manifest.parent == f"2_Step-{2 * STEPS_PER_UPDATE}.ckpt"


def test_foreign_config_is_refused(new_game: NewGame) -> None:
    game = new_game(small())
    other = Incarnation(dataclasses.replace(game.role, config=small(seed=9)))
    with pytest.raises(ConfigError, match="start the role with the run's own"):
        Trainer.start(other)
    assert game.role.flow.read().epoch == 1, "the trainer that runs was not fenced"
