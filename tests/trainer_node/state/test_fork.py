"""Going back to an older checkpoint, and beginning from another run's: new versions of old weights."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from stagecoach.coordinator.lifecycle.preparation import create_flow
from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.experience import tensor_blob
from stagecoach.shared.experience.spaces import Columns
from stagecoach.shared.policies.registry import build_policies
from stagecoach.shared.policies.serialization import decode_policy, encode_policy, state_arrays
from stagecoach.shared.storage.checkpoint_store import Checkpoint, Manifest
from stagecoach.trainer_node.learning.building_blocks.optimization import part
from stagecoach.trainer_node.state.fork import Source, forked, forked_whole, rolled_back, take_over
from stagecoach.trainer_node.state.snapshot import learned_sha256
from tests.conftest import minimal_config
from tests.support.experience.fragments import SIMPLE
from tests.support.learning.cases import config_of
from tests.support.runs.game import (
    KEEP,
    POLICY,
    STEPS_PER_UPDATE,
    Game,
    NewGame,
    archived,
    balanced,
    dumped_redis,
    replayed,
    restore_redis,
    small,
)


def go_back(game: Game, version: int) -> Checkpoint:
    """What `resume --from` does between two lives of the run; answers the older checkpoint."""
    name = f"{version}_Step-{version * STEPS_PER_UPDATE}.ckpt"
    older = game.role.checkpoints.load(name)
    taken = rolled_back(game.role, older, game.role.flow.take_over()).checkpoint
    game.role.checkpoints.write(taken.manifest, taken.objects)
    return older


def test_roll_back_continues_weights_counters_and_optimizer(new_game: NewGame) -> None:
    game = new_game(archived())
    game.play_to(5, durable=True)
    game.crash()
    older = go_back(game, 2)
    game.restart()
    assert game.trainer.version == game.board_version() == 6
    learner = game.trainer.learner
    then, now = game.weights(older.manifest.name), state_arrays(learner.policies["default"])
    assert all(np.array_equal(then[name], now[name]) for name in then)
    assert (learner.counters.train.updates, learner.counters.train.env_steps) == (2, 2 * STEPS_PER_UPDATE)
    newest = f"6_Step-{2 * STEPS_PER_UPDATE}.ckpt"
    manifest = game.role.checkpoints.manifest(newest)
    assert (manifest.parent, manifest.version) == (older.manifest.name, 6)
    game.durable()
    algorithm = "trainer/default.algorithm.safetensors"
    assert game.role.checkpoints.load(newest).objects[algorithm] == older.objects[algorithm]
    game.finish()
    content = game.finished()
    assert content["counters"]["train"]["updates"] == 6 and content["version"] == 10
    balanced(game)
    assert replayed(game, newest).equal


def test_roll_back_drops_fragments_of_abandoned_policy(new_game: NewGame) -> None:
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


def test_rolling_back_twice_with_crash_leaves_one_history(new_game: NewGame) -> None:
    game = new_game(small(checkpoint=KEEP))
    game.play_to(4, durable=True)
    game.crash()
    go_back(game, 2)
    go_back(game, 4)
    game.restart()
    assert game.trainer.version == 6 and game.trainer.learner.counters.train.updates == 4
    game.replace_trainer()
    assert game.trainer.version == 6 and game.board_version() == 6
    game.finish()
    assert game.finished()["counters"]["train"]["updates"] == 6
    balanced(game)


@pytest.mark.parametrize("lost", ["everything", "what came after"])
def test_roll_back_works_with_redis_that_lost_the_run(new_game: NewGame, lost: str) -> None:
    game = new_game(small(checkpoint=KEEP))
    game.play_to(1)
    early = dumped_redis(game)
    game.play_to(4, durable=True)
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


def all_of(checkpoint: Checkpoint, policies: Iterable[str] = ("default",)) -> dict[str, Source]:
    """Every policy begins as the one of its name there."""
    return {policy_id: Source(checkpoint, policy_id) for policy_id in policies}


def test_fork_takes_policies_and_nothing_else(new_game: NewGame) -> None:
    """As `train --initialize-from` does before any role starts: the game has begun, so it is begun again."""
    source, game = new_game(small(checkpoint=KEEP)), new_game(small(seed=7, stop_at={"updates": 3}))
    source.finish()
    before = {key: source.role.checkpoints.store.get(key) for key in source.role.checkpoints.store.keys("")}
    name = f"6_Step-{6 * STEPS_PER_UPDATE}.ckpt"
    game.crash()
    game.worker.stop("not yet")
    for begun in game.role.checkpoints.names():
        game.role.checkpoints.delete(begun)
    restore_redis(game, {})
    create_flow(game.role)
    first = forked(game.role, all_of(source.role.checkpoints.load(name, only=POLICY)))
    game.role.checkpoints.write(first.manifest, first.objects)
    game.restart()
    game.worker = game.another_worker(0)
    assert game.trainer.version == game.board_version() == 0
    then, now = source.weights(name), state_arrays(game.trainer.learner.policies["default"])
    assert all(np.array_equal(then[key], now[key]) for key in then)
    assert game.trainer.learner.counters.train.env_steps == 0
    manifest = game.role.checkpoints.manifest("0_Step-0.ckpt")
    assert manifest.provenance["initialized_from"]["run_id"] == source.role.run_id
    assert manifest.provenance["initialized_from"]["checkpoint"] == name
    game.finish()
    assert game.finished()["counters"]["train"]["updates"] == 3
    balanced(game)
    assert {key: source.role.checkpoints.store.get(key) for key in source.role.checkpoints.store.keys("")} == before


def networks(taken: Checkpoint) -> tuple[Columns, Columns]:
    policy, _ = decode_policy(taken.objects[POLICY])
    return state_arrays(policy), tensor_blob.decode(taken.objects["trainer/default.algorithm.safetensors"])[0]


@pytest.mark.parametrize("case", ["appo", "dqn", "rainbow", "sac", "discrete sac", "td3", "ddpg", "cql", "iql"])
def test_fork_copies_targets_and_keeps_critics(new_game: NewGame, tmp_path: Path, case: str) -> None:
    source = new_game(config_of(case, tmp_path, heatup="0 env_steps"))
    source.play_to(3)
    there = source.trainer.state.snapshot()
    then, learned = networks(there.checkpoint)
    game = new_game(config_of(case, tmp_path, heatup="0 env_steps", seed=7))
    begun = forked(game.role, all_of(there.checkpoint))
    policy, beside = networks(begun)
    online = {"target/": policy, "target_policy/": policy, "targets/": part(learned, "critics/")}
    online["critics/"] = online["targets/"]
    for name, array in beside.items():
        prefix = name[: name.find("/") + 1]
        if prefix in online:
            assert np.array_equal(array, online[prefix][name.removeprefix(prefix)]), name
    assert all(np.array_equal(then[name], array) for name, array in policy.items())
    said = begun.manifest.provenance["initialized_from"]["summary"]
    assert ("critics" in said.partition(";")[0]) == ("critics/weights.0" in beside)
    if "log_temperature" in beside:
        assert beside["log_temperature"] == learned["log_temperature"] != 0 and "temperature" in said.partition(";")[0]
    assert not any(name.startswith(("adam/", "optimizer/")) and array.any() for name, array in beside.items())


def test_whole_fork_continues_the_learner(new_game: NewGame) -> None:
    """Weights, optimizer and counters go on; the learning rate is this run's."""
    source = new_game(small(checkpoint=KEEP))
    source.play_to(3)
    there = source.trainer.state.snapshot().checkpoint
    game = new_game(small(seed=7, algorithm={"minibatch_size": 8, "learning_rate": 1e-4}))
    begun = forked_whole(game.role, there)
    for key in (POLICY, "trainer/default.algorithm.safetensors"):
        then, now = (tensor_blob.decode(found.objects[key])[0] for found in (there, begun))
        assert then.keys() == now.keys() and all(np.array_equal(then[name], now[name]) for name in then)
    assert begun.manifest.version == 0 and begun.manifest.name == f"0_Step-{3 * STEPS_PER_UPDATE}.ckpt"
    assert begun.manifest.provenance["counters"] == there.manifest.provenance["counters"]
    origin = begun.manifest.provenance["initialized_from"]
    assert origin["learned_sha256"] == learned_sha256(there.manifest) and origin["summary"] == "taken: everything"


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"policies": {"default": {"hidden_sizes": [9]}}}, "another network than this run's config"),
        ({"environment": {"id": "Acrobot-v1", "num_envs": 2}}, "other spaces"),
        ({"algorithm": {"name": "dqn", "minibatch_size": 8}}, "its replay buffer or players are in that run alone"),
    ],
)
def test_whole_fork_refuses_what_does_not_fit(new_game: NewGame, sections: Any, said: str) -> None:
    source, game = new_game(small()), new_game(small(**sections))
    with pytest.raises(ConfigError, match=said):
        forked_whole(game.role, source.role.checkpoints.load("0_Step-0.ckpt"))


def test_fork_accepts_policy_with_hyphen_in_its_name(new_game: NewGame, tmp_path: Path) -> None:
    policies = {"red-elite": {"hidden_sizes": [8]}}
    source = new_game(config_of("discrete sac", tmp_path, heatup="0 env_steps", policies=policies))
    source.play_to(2)
    there = source.trainer.state.snapshot().checkpoint
    there.manifest.provenance["algorithms"] = {"red": "ppo"}  # as of a policy `red` beside it
    begun = forked(
        new_game(config_of("discrete sac", tmp_path, seed=7, policies=policies)).role,
        {"red-elite": Source(there, "red-elite")},
    )
    summary = begun.manifest.provenance["initialized_from"]["summary"]
    assert summary.startswith("taken: policy, critics"), summary


def test_fork_resets_critics_of_another_algorithm(new_game: NewGame, tmp_path: Path) -> None:
    policies = {"default": {"hidden_sizes": [8], "normalize_rewards": True}}
    source = new_game(config_of("discrete sac", tmp_path, heatup="0 env_steps", policies=policies))
    source.play_to(2)
    there = source.trainer.state.snapshot()
    game = new_game(config_of("discrete cql", tmp_path, seed=7, policies=policies))
    before = networks(game.trainer.state.snapshot().checkpoint)[1]
    begun = forked(game.role, all_of(there.checkpoint))
    _, beside = networks(begun)
    assert all(np.array_equal(before[name], array) for name, array in beside.items())
    assert begun.manifest.provenance["initialized_from"]["summary"] == (
        "taken: policy, reward statistics; reset: critics and temperature and conservatism (learned by sac "
        "there, by cql here), optimizers, counters, replay buffer"
    )


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"policies": {"default": {"hidden_sizes": [9]}}},
            r"hidden_sizes=\[8\] there, hidden_sizes=\[9\] here; set it as there.*shape \(8, 4\), expected .*\(9, 4\)",
        ),
        ({"policies": {"default": {"hidden_sizes": [8], "activation": "relu"}}}, "=tanh there, activation=relu here"),
        (
            {"policies": {"default": {"hidden_sizes": [8]}}, "algorithm": {"name": "dqn", "minibatch_size": 8}},
            "kind=actor_critic.* there, kind=q_network.* here; set it as there",
        ),
        ({"environment": {"id": "Acrobot-v1", "num_envs": 2}}, "other observation or action spaces"),
        ({"policies": {"other": {"hidden_sizes": [8]}}}, "has no policy 'other'; it has default"),
    ],
)
def test_policies_that_do_not_fit_are_refused_by_name(new_game: NewGame, sections: Any, said: str) -> None:
    source, game = new_game(small(policies={"default": {"hidden_sizes": [8]}})), new_game(small(**sections))
    with pytest.raises(ConfigError, match=said):
        forked(game.role, all_of(source.role.checkpoints.load("0_Step-0.ckpt"), game.role.config.policies))


def policy_of(**sections: Any) -> Any:
    config = minimal_config(**sections)
    return build_policies(SIMPLE.policies, config.policies, config.algorithm, 0)["default"]


def take(there: dict[str, Any], here: dict[str, Any]) -> None:
    manifest = cast(Any, Manifest).model_construct(name="1_Step-1.ckpt", run_id="other")
    source = Source(
        Checkpoint(manifest, {"default/policy.safetensors": encode_policy(policy_of(**there), 1)}), "default"
    )
    take_over("default", policy_of(**here), source)


@pytest.mark.parametrize(
    ("name", "field", "values"),
    [
        ("dqn", "v_max", (10.0, 200.0)), ("dqn", "v_min", (-10.0, 0.0)), ("dqn", "prior_scale", (1.0, 3.0)),
        ("r2d2", "rescale_values", (True, False)),
    ],
)  # fmt: skip
def test_take_over_refuses_q_network_of_another_scale(name: str, field: str, values: tuple[Any, Any]) -> None:
    more = {"head": "c51"} if field.startswith("v_") else {"heads": 3} if field == "prior_scale" else {}
    exploring = {"exploration": {"kind": "bootstrapped"}} if "heads" in more else {}
    cores = {"policies": {"default": {"core": "lstm", "share_encoder": True}}} if name == "r2d2" else {}
    there, here = ({"algorithm": {"name": name, field: its} | more | exploring} | cores for its in values)
    take(there, there)
    with pytest.raises(ConfigError, match=r"is another network than policies.default asks for: network="):
        take(there, here)
