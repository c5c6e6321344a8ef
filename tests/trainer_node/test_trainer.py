"""The trainer with a real Redis, a folder store and a real worker, stepped in turn: same log, same weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from shared import fragment
from shared.checkpoint import CHECKPOINTS, READY
from shared.errors import CheckpointDamaged, ConfigError, Fenced, StoreUnavailable, WeightsNotFinite
from shared.experience_log import ExperienceLog, LogEntry
from shared.policies.codec import finite, state_arrays
from shared.policy_board import PolicyBoard
from shared.redis_keys import RunKeys
from shared.steps import Phase
from tests.support.checkpoints import key_of
from tests.trainer_node.game import POLICY, Game, NewGame, balanced, small
from trainer_node.trainer import Trainer

STEPS_PER_UPDATE = 8 * 4 * 2


# Same log, same weights


def test_two_runs_with_the_same_seed_end_with_the_same_weights_and_another_seed_with_others(new_game: NewGame) -> None:
    hashes = [new_game(small(seed=seed)).finish() for seed in (3, 3, 4)]
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize("crash_at", [1, 2, 3, 5])
def test_a_crash_in_the_middle_changes_no_weight_republishes_nothing_and_keeps_the_books(
    new_game: NewGame, crash_at: int
) -> None:
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


def test_a_trainer_that_crashes_at_every_version_ends_with_the_same_weights(new_game: NewGame) -> None:
    expected = new_game(small()).finish()
    game = new_game(small())
    for version in range(1, 6):
        game.play_to(version)
        game.crash()
        game.restart()
    assert game.finish() == expected
    balanced(game)


def test_the_policies_travel_through_the_store_with_the_same_outcome(new_game: NewGame) -> None:
    through_redis, through_store = (
        new_game(small(policy_versions={"transport": transport}, checkpoint={"every": "1 updates", "keep_last": 2}))
        for transport in ("redis", "object_store")
    )
    through_redis.finish()
    through_store.play_to(3)
    board: Any = through_store.role.redis.hgetall(RunKeys(through_store.role.run_id).board)
    assert board[b"blob"] == b"" and board[b"checkpoint"].decode() == f"3_Step-{3 * STEPS_PER_UPDATE}.ckpt"
    through_store.crash()
    through_store.restart()
    through_store.finish()
    names = [game.role.checkpoints.names()[-1] for game in (through_redis, through_store)]
    assert names == [f"6_Step-{6 * STEPS_PER_UPDATE}.ckpt"] * 2
    one, other = through_redis.weights(names[0]), through_store.weights(names[1])
    assert all(np.array_equal(one[name], other[name]) for name in one)
    balanced(through_store)


def test_more_lag_still_comes_to_its_end_with_the_books_right_and_no_fragment_older(new_game: NewGame) -> None:
    game = new_game(small(rollout={"fragment_steps": 8, "fragments_per_update": 2, "max_policy_lag": 2}))
    for _ in range(6):
        game.worker.step(0)
    game.finish()
    latest = game.role.checkpoints.load_latest()
    assert latest is not None
    lags = {int(lag): count for lag, count in latest.manifest.provenance["lag_histogram"].items()}
    assert sum(lags.values()) == 12 and 0 < max(lags) <= 2
    balanced(game)


def test_a_run_that_reaches_its_bound_is_exhausted_with_final_checkpoint_counters_and_books(new_game: NewGame) -> None:
    game = new_game(small(stop_at={"updates": 3}))
    game.finish()
    content = game.finished()
    final = f"3_Step-{3 * STEPS_PER_UPDATE}.ckpt"
    assert content["reason"] == "exhausted" and content["final"] == final and content["version"] == 3
    assert content["run_id"] == game.role.run_id and content["time"] > 0
    assert content["counters"]["train"]["updates"] == 3
    assert content["counters"]["train"]["env_steps"] == 3 * STEPS_PER_UPDATE
    assert content["ledger"] == balanced(game)
    pointer = game.role.checkpoints.pointer()
    assert pointer is not None and pointer.final == pointer.latest == final
    assert game.role.flow.read().state == "finished"
    assert game.worker.step(0) == "end:finished"


def test_a_run_that_is_stopped_says_so_and_keeps_what_it_has_learnt(new_game: NewGame) -> None:
    game = new_game(small(stop_at={"updates": 1000}))
    game.play_to(3)
    assert game.role.flow.set_state("stopping", "stopped", expected="running")
    game.finish()
    content = game.finished()
    assert content["reason"] == "stopped" and content["final"] == f"3_Step-{3 * STEPS_PER_UPDATE}.ckpt"
    assert game.role.checkpoints.load(content["final"]).manifest.version == 3


def test_a_stop_that_comes_while_a_trainer_reads_again_ends_with_what_was_published_before(new_game: NewGame) -> None:
    expected = new_game(small(stop_at={"updates": 5})).finish()
    game = new_game(small())
    game.play_to(5)
    game.crash()
    game.restart()
    assert game.trainer.version < 5
    assert game.role.flow.set_state("stopping", "stopped", expected="running")
    assert game.finish() == expected
    assert (game.finished()["reason"], game.finished()["version"]) == ("stopped", 5)
    balanced(game)


def test_version_0_is_durable_and_ready_before_anybody_acts(new_game: NewGame) -> None:
    game = new_game(small())
    ready = game.role.checkpoints.marker(READY)
    assert ready is not None and ready["checkpoint"] == "0_Step-0.ckpt"
    assert game.board_version() == 0
    assert game.role.checkpoints.load("0_Step-0.ckpt").manifest.parent is None


def test_checkpoints_name_their_parents_and_the_range_that_they_add(
    new_game: NewGame, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        game.play_to(version)
        game.durable()
    manifests = [game.role.checkpoints.manifest(name) for name in game.role.checkpoints.names()]
    assert [(item.version, item.parent) for item in manifests] == [
        (0, None), (2, manifests[0].name), (4, manifests[1].name)
    ]  # fmt: skip
    assert [item.log_position for item in manifests] == ["0-0", ids[3], ids[7]]
    assert manifests[2].provenance["log_range"] == [ids[3], ids[7]]
    assert manifests[2].provenance["policy_versions"] == [2, 4]
    assert game.role.flow.read().trimmed_id == ids[7] and len(log) == 0
    for item in manifests:  # the equation, at every checkpoint
        books = item.provenance["books"]
        assert all(line["balances"] for line in books.values())
        assert books["total"]["produced"]["fragments"] >= 2 * item.version
    game.finish()
    assert game.role.checkpoints.manifest(manifests[2].name) == manifests[2], "the last one is the one that was due"


# What it refuses


def test_weights_that_are_not_finite_end_the_run_with_a_diagnosis_and_reach_neither_store_nor_board(
    new_game: NewGame,
) -> None:
    game = new_game(small(algorithm={"minibatch_size": 32, "epochs": 2, "learning_rate": 1e30}))
    with pytest.raises(WeightsNotFinite, match=r"weights of default infinite or NaN.*learning_rate") as caught:
        game.finish()
    game.trainer.fail(caught.value)
    content = game.finished()
    assert content["reason"].startswith("failed: update ") and "learning_rate" in content["reason"]
    assert content["final"] is None
    assert (game.role.flow.read().state, game.role.flow.read().reason) == ("finished", content["reason"])
    board = PolicyBoard(game.role.redis, game.role.run_id).fetch(game.role.checkpoints)
    assert board is not None and finite(board.states["default"])
    names = game.role.checkpoints.names()
    assert names and all(finite(game.weights(name)) for name in names)
    assert game.worker.step(0) == "end:finished"


def test_a_finite_reward_beyond_the_bound_costs_its_fragment_and_not_the_run(new_game: NewGame) -> None:
    environment = {"id": "tests.environments_for_tests:Hostile", "num_envs": 4}
    game = new_game(small(environment=environment, policies={"default": {"hidden_sizes": [8]}}))
    game.finish()
    assert game.finished()["reason"] == "exhausted"
    assert list(balanced(game)["total"]["dropped"]) == ["magnitude"]
    told = game.events("dropped")
    assert told.count("is magnitude") == 1 and "3e+38" in told


def test_heat_up_acts_at_random_counts_apart_learns_the_normaliser_and_no_weight(new_game: NewGame) -> None:
    game = new_game(
        small(heatup=f"{2 * STEPS_PER_UPDATE} env_steps", checkpoint={"every": "1 updates", "keep_last": 9})
    )
    log, entries = ExperienceLog(game.role.redis, game.role.run_id), []
    game.play_to(2)
    entries = log.read("0-0", 100, 0.0)
    headers = [fragment.decode(entry.fragment or b"").header for entry in entries]
    assert [header.phase for header in headers] == [Phase.HEATUP] * 4
    columns = [fragment.decode(entry.fragment or b"").columns["default"] for entry in entries]
    assert all(np.allclose(item["log_prob"], -np.log(2)) for item in columns), "both actions are as probable"
    assert {int(action) for item in columns for action in item["action"].flat} == {0, 1}
    counters = game.trainer._learner.counters
    assert (counters.heatup.env_steps, counters.heatup.updates) == (2 * STEPS_PER_UPDATE, 0)
    assert (counters.train.env_steps, counters.train.updates, counters.train.episodes) == (0, 0, 0)
    before, after = game.weights("0_Step-0.ckpt"), state_arrays(game.trainer._learner.policies["default"])
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed and all(name.startswith("normaliser.") for name in changed)
    game.finish()
    content = game.finished()
    assert content["counters"]["heatup"]["env_steps"] == 2 * STEPS_PER_UPDATE
    assert content["counters"]["train"] | {"episodes": 0} == {
        "env_steps": 6 * STEPS_PER_UPDATE, "updates": 6, "episodes": 0
    }  # fmt: skip
    assert content["version"] == 8
    balanced(game)


def test_a_crash_in_heat_up_changes_nothing_either(new_game: NewGame) -> None:
    config = small(heatup=f"{3 * STEPS_PER_UPDATE} env_steps", stop_at={"updates": 2})
    expected = new_game(config).finish()
    game = new_game(config)
    game.play_to(2)
    game.crash()
    game.restart()
    assert game.finish() == expected


def damage(game: Game, name: str) -> None:
    """One byte of a checkpoint's policy is another."""
    key = key_of(game.role.checkpoints, name, POLICY)
    data = bytearray(game.role.checkpoints.store.get(key))
    data[-1] ^= 1
    game.role.checkpoints.store.put(key, bytes(data))


def test_behind_a_damaged_checkpoint_the_one_before_goes_on_as_a_newer_version_and_says_so(new_game: NewGame) -> None:
    game = new_game(small())
    game.play_to(5)
    game.durable()
    newest, before = f"4_Step-{4 * STEPS_PER_UPDATE}.ckpt", f"2_Step-{2 * STEPS_PER_UPDATE}.ckpt"
    game.crash()
    damage(game, newest)
    game.restart()
    said = game.events("trainer")
    assert f"{newest}/{POLICY} was altered" in said and f"going back to {before}" in said
    assert "trimmed: goes on as version 6" in said
    assert game.board_version() == game.role.flow.read().version == 6
    restarted, old = state_arrays(game.trainer._learner.policies["default"]), game.weights(before)
    assert all(np.array_equal(restarted[name], old[name]) for name in old)
    game.finish()
    latest = game.role.checkpoints.load_latest()
    assert latest is not None and latest.manifest.version > 6
    assert latest.manifest.name == game.finished()["final"]
    balanced(game)


def test_a_damaged_checkpoint_is_made_good_where_the_log_still_reaches_back(
    new_game: NewGame, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert game.finish() == expected
    assert game.role.checkpoints.load(damaged).manifest.version == 4
    assert "reading the log again up to version 5" in game.events("trainer")
    balanced(game)


def test_where_no_checkpoint_can_be_read_the_trainer_refuses_and_writes_nothing(new_game: NewGame) -> None:
    game = new_game(small())
    game.play_to(3)
    game.durable()
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


def test_an_older_trainer_that_wakes_up_again_is_fenced_and_publishes_nothing(new_game: NewGame) -> None:
    game = new_game(small())
    game.play_to(1)
    old = game.trainer
    game.restart()
    while game.trainer.version < 1:
        game.trainer.step(0)
    for _ in range(2):
        game.worker.step(0)
    with pytest.raises(Fenced):
        old.step(0)
    assert game.board_version() == 1
    old._publisher.close()
    old._heartbeat._stop.set()
    game.finish()
    balanced(game)


def test_the_last_checkpoint_names_its_parent_even_when_it_was_due_and_not_yet_durable(
    new_game: NewGame, monkeypatch: pytest.MonkeyPatch
) -> None:
    game = new_game(small(stop_at={"updates": 4}))
    game.play_to(3)
    game.durable()
    with monkeypatch.context() as patch:  # the store takes its time: the due one still waits when the last one comes
        patch.setattr(game.trainer._publisher, "submit", lambda snapshot: None)
        game.play_to(4)
    game.finish()
    latest = game.role.checkpoints.load_latest()
    assert latest is not None and latest.manifest.version == 4
    assert latest.manifest.parent == f"2_Step-{2 * STEPS_PER_UPDATE}.ckpt"


def test_a_config_that_is_not_the_runs_is_refused(new_game: NewGame) -> None:
    game = new_game(small())
    other = Trainer(dataclasses.replace(game.role, config=small(seed=9)), None)
    with pytest.raises(ConfigError, match="start the role with the run's own"):
        other.start()
    assert game.role.flow.read().epoch == 1, "the trainer that runs was not fenced"
