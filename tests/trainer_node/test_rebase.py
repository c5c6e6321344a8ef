"""Going back to an older checkpoint, and beginning from another run's: new versions of old weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shared.checkpoint import Checkpoint
from shared.errors import ConfigError
from shared.policies.codec import state_arrays
from shared.redis_keys import RunKeys
from tests.conftest import create_flow
from tests.trainer_node.game import POLICY, Game, NewGame, balanced, small
from tests.trainer_node.test_recovery import restore_redis
from tests.trainer_node.test_trainer import STEPS_PER_UPDATE
from trainer_node.rebase import initialised, rebased
from trainer_node.replay import replay

KEEP = {"every": "2 updates", "keep_last": 9}


def go_back(game: Game, version: int) -> Checkpoint:
    """What `resume --from` does between two lives of the run; answers the older checkpoint."""
    name = f"{version}_Step-{version * STEPS_PER_UPDATE}.ckpt"
    older = game.role.checkpoints.load(name)
    taken = rebased(game.role, older, game.role.flow.take_over())
    game.role.checkpoints.write(taken.manifest, taken.objects)
    return older


def test_the_older_weights_counters_and_optimiser_go_on_as_the_newest_version(new_game: NewGame) -> None:
    game = new_game(small(archive="all", checkpoint=KEEP))
    game.play_to(5)
    game.durable()
    game.crash()
    older = go_back(game, 2)
    game.restart()
    assert game.trainer.version == game.board_version() == 6
    learner = game.trainer._learner
    then, now = game.weights(older.manifest.name), state_arrays(learner.policies["default"])
    assert all(np.array_equal(then[name], now[name]) for name in then)
    assert (learner.counters.train.updates, learner.counters.train.env_steps) == (2, 2 * STEPS_PER_UPDATE)
    newest = f"6_Step-{2 * STEPS_PER_UPDATE}.ckpt"
    manifest = game.role.checkpoints.manifest(newest)
    assert (manifest.parent, manifest.version) == (older.manifest.name, 6)
    game.durable()
    assert (
        game.role.checkpoints.load(newest).objects["trainer/default.algorithm.safetensors"]
        == (older.objects["trainer/default.algorithm.safetensors"])
    )
    game.finish()
    content = game.finished()
    assert content["counters"]["train"]["updates"] == 6 and content["version"] == 10
    balanced(game)
    assert replay(game.role.checkpoints, game.role.config, game.role.description(), newest, content["final"]).equal


def test_what_the_abandoned_policy_acted_is_not_learnt_whatever_lag_is_allowed(new_game: NewGame) -> None:
    rollout = {"fragment_steps": 8, "fragments_per_update": 2, "max_policy_lag": 2}
    game = new_game(small(checkpoint=KEEP, rollout=rollout))
    game.play_to(4)
    while game.worker.step(0) == "pushed":
        pass
    in_flight = game.role.flow.read().in_flight
    game.durable()
    game.crash()
    go_back(game, 2)
    game.restart()
    game.finish()
    assert balanced(game)["total"]["dropped"]["stale"]["fragments"] == in_flight > 2


def test_going_back_twice_and_crashing_in_between_leaves_one_history(new_game: NewGame) -> None:
    game = new_game(small(checkpoint=KEEP))
    game.play_to(4)
    game.durable()
    game.crash()
    go_back(game, 2)
    go_back(game, 4)
    game.restart()
    assert game.trainer.version == 6 and game.trainer._learner.counters.train.updates == 4
    game.crash()
    game.restart()
    assert game.trainer.version == 6 and game.board_version() == 6
    game.finish()
    assert game.finished()["counters"]["train"]["updates"] == 6
    balanced(game)


@pytest.mark.parametrize("lost", ["everything", "what came after"])
def test_going_back_with_a_redis_that_has_lost_the_run(new_game: NewGame, lost: str) -> None:
    game = new_game(small(checkpoint=KEEP))
    game.play_to(1)
    redis = game.role.redis
    early: dict[bytes, Any] = {key: redis.dump(key) for key in redis.scan_iter(f"{RunKeys(game.role.run_id).prefix}*")}
    game.play_to(4)
    game.durable()
    game.crash()
    game.worker.stop("the machine is gone")
    restore_redis(game, {} if lost == "everything" else early)
    create_flow(game.role)
    go_back(game, 2)
    game.restart()
    assert game.trainer.version == game.board_version() == 5, "newer than all that the store has"
    game.worker = game.another_worker(0)
    game.finish()
    assert game.finished()["counters"]["train"]["updates"] == 6
    balanced(game)


def begun_from(game: Game, source: Checkpoint) -> None:
    """What `train --initialize-from` does before any role starts: the game has begun, so it is begun again."""
    game.crash()
    game.worker.stop("not yet")
    for name in game.role.checkpoints.names():
        game.role.checkpoints.delete(name)
    restore_redis(game, {})
    create_flow(game.role)
    first = initialised(game.role, source)
    game.role.checkpoints.write(first.manifest, first.objects)
    game.restart()
    game.worker = game.another_worker(0)


def test_a_run_that_begins_from_another_has_its_policies_and_nothing_else_of_it(new_game: NewGame) -> None:
    source, game = new_game(small(checkpoint=KEEP)), new_game(small(seed=7, stop_at={"updates": 3}))
    source.finish()
    before = {key: source.role.checkpoints.store.get(key) for key in source.role.checkpoints.store.keys("")}
    name = f"6_Step-{6 * STEPS_PER_UPDATE}.ckpt"
    begun_from(game, source.role.checkpoints.load(name, only=POLICY))
    assert game.trainer.version == game.board_version() == 0
    then, now = source.weights(name), state_arrays(game.trainer._learner.policies["default"])
    assert all(np.array_equal(then[key], now[key]) for key in then)
    assert game.trainer._learner.counters.train.env_steps == 0
    manifest = game.role.checkpoints.manifest("0_Step-0.ckpt")
    assert manifest.provenance["initialized_from"]["run_id"] == source.role.run_id
    assert manifest.provenance["initialized_from"]["checkpoint"] == name
    game.finish()
    assert game.finished()["counters"]["train"]["updates"] == 3
    balanced(game)
    assert {key: source.role.checkpoints.store.get(key) for key in source.role.checkpoints.store.keys("")} == before


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"policies": {"default": {"hidden_sizes": [9]}}}, "another network than policies.default asks for"),
        ({"environment": {"id": "Acrobot-v1", "num_envs": 2}}, "other observation or action spaces"),
        ({"policies": {"other": {"hidden_sizes": [8]}}}, "has no policy 'other'; it has default"),
    ],
)
def test_policies_that_do_not_fit_are_refused_by_name(new_game: NewGame, sections: Any, said: str) -> None:
    source, game = new_game(small(policies={"default": {"hidden_sizes": [8]}})), new_game(small(**sections))
    with pytest.raises(ConfigError, match=said):
        initialised(game.role, source.role.checkpoints.load("0_Step-0.ckpt"))
