"""Policies that are really several: PPO beside SAC beside one that does not learn, in one environment."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.config.recorded import DatasetConfig
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.datasets.read import read_dataset
from stagecoach.shared.deployment.deployed_policy import load_policy
from stagecoach.shared.experience import fragment, tensor_blob
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.policies.serialization import decode_policy, state_arrays
from stagecoach.shared.storage.log_archive import Archive
from stagecoach.shared.storage.metric_log import TRAIN
from stagecoach.trainer_node.export import compare, random_observations, to_onnx
from stagecoach.trainer_node.state.fork import Source, forked
from tests.conftest import minimal_config
from tests.support.environments.games import MODULE
from tests.support.environments.small import OWL_CHASE
from tests.support.learning.cases import DRAWING, changing
from tests.support.runs.game import KEEP, NewGame, balanced, goes_on_exactly
from tests.support.runs.metric_rows import recorded

PPO = {"name": "ppo", "minibatch_size": 20, "epochs": 2, "learning_rate": changing(3e-3, 1e-4)}
SMALL = {"hidden_sizes": [8], "normalize_observations": True, "normalize_rewards": True}
SAC = {"name": "sac", **DRAWING, "exploration": {"kind": "gaussian", "sigma": changing(0.5, 0.1)}}
POLICIES: dict[str, Any] = {
    "hunter": SMALL,
    "prey": SMALL | {"activation": "relu", "algorithm": SAC},
    "watcher": {"hidden_sizes": [6], "normalize_observations": True, "trainable": False, "algorithm": {"gamma": 0.5}},
}


def three(**sections: Any) -> Config:
    standard = OWL_CHASE | {"algorithm": PPO, "policies": POLICIES, "heatup": "40 env_steps", "checkpoint": KEEP}
    return minimal_config(**(standard | {"stop_at": {"updates": 7}, "archive": "all"} | sections))


def test_ppo_sac_and_frozen_policy_resume_exactly(new_game: NewGame) -> None:
    goes_on_exactly(new_game, three())


def test_policies_learn_from_archive_and_resume_exactly(new_game: NewGame) -> None:
    teacher = new_game(three(stop_at={"updates": 4}))
    teacher.finish()
    evaluated = {"every_updates": 5, "gradient_steps": 3}
    dataset = {"path": str(teacher.folder), "evaluation": evaluated}
    clone, better = {"name": "bc", "minibatch_size": 20}, {"name": "iql", "minibatch_size": 8}
    policies = POLICIES | {"prey": SMALL | {"algorithm": better}}
    config = three(dataset=dataset, algorithm=clone, policies=policies, heatup="0 env_steps")
    goes_on_exactly(new_game, config)
    game = new_game(config)
    known = read_dataset(DatasetConfig(path=str(teacher.folder)), game.role.description().of(["hunter", "prey"]))
    game.finish()
    for entry in Archive(game.role.checkpoints.store, game.role.run_id).entries():
        columns = fragment.decode(entry.fragment or b"").columns
        assert not columns["watcher"]["mask"].any(), "it does not learn"
        for name, recording in known.items():
            rows = columns[name]["obs"][columns[name]["mask"]]
            assert {row.tobytes() for row in rows} <= {row.tobytes() for row in recording.columns["obs"]} and len(rows)
    row = {name: its for _, row in recorded(game.role.checkpoints.store, TRAIN) for name, its in row.items()}
    assert {name for name in row if name.startswith("ope/dm")} == {"ope/dm/hunter", "ope/dm/prey"}


def test_only_policies_that_imitate_need_demonstrations(new_game: NewGame) -> None:
    teacher = new_game(three(stop_at={"updates": 2}))
    teacher.finish()
    cloning = {"strength": 0.5, "minibatch_size": 8}
    config = three(demonstrations={"path": str(teacher.folder)}, algorithm=PPO | {"behavioral_cloning": cloning})
    game = new_game(config)
    assert list(game.trainer.learner.demonstrations) == ["hunter"]
    shown = game.trainer.learner.demonstrations["hunter"].columns["obs"]
    archived = read_dataset(DatasetConfig(path=str(teacher.folder)), game.role.description().of(["hunter"]))
    assert len(shown) == len(archived["hunter"])
    game.finish()
    row = recorded(game.role.checkpoints.store, TRAIN)[-1][1]
    assert row["train/cloning_loss/hunter"] > 0 and "train/cloning_loss/prey" not in row


def test_each_policy_learns_by_its_own_algorithm(new_game: NewGame) -> None:
    game = new_game(three())
    learner = game.trainer.learner
    before = {name: state_arrays(policy) for name, policy in learner.policies.items()}
    assert {name: type(its).__name__ for name, its in learner.algorithms.items()} == {"hunter": "PPO", "prey": "SAC"}
    game.finish()
    for name, policy in learner.policies.items():
        same = [np.array_equal(before[name][key], array) for key, array in state_arrays(policy).items()]
        assert all(same) if name == "watcher" else not all(same), name
    balanced(game)
    assert {name for name in game.latest().objects if "watcher" in name} == {"watcher/policy.safetensors"}
    row = recorded(game.role.checkpoints.store, TRAIN)[-1][1]
    returns = [row[f"rollout/ep_rew_mean/{name}"] for name in POLICIES]
    assert sum(returns) == pytest.approx(row["rollout/ep_rew_mean"]) and min(returns) != max(returns)
    played = {name: row[f"time/transitions/{name}"] for name in POLICIES}
    assert 0 < played["hunter"] < played["watcher"] < played["prey"] == row["time/env_steps"]
    assert row["time/episodes/hunter"] >= row["time/episodes"] > 0


def test_frozen_policy_acts_in_warm_up_without_log_prob(new_game: NewGame) -> None:
    watcher = POLICIES["watcher"] | {"algorithm": {"name": "dqn", "exploration": {"kind": "epsilon_greedy"}}}
    game = new_game(three(policies=POLICIES | {"watcher": watcher}))
    assert game.worker.step(0) == "pushed"
    (entry,) = game.role.log().read("0-0", 1, 0.0)
    assert entry.fragment is not None
    acted = fragment.decode(entry.fragment)
    assert acted.header.phase is Phase.HEATUP
    said = {name: np.exp(columns["log_prob"].astype(float)) for name, columns in acted.columns.items()}
    assert said["hunter"] == pytest.approx(0.5)
    assert said["watcher"].max() == pytest.approx(0.975), "epsilon is 0.05: its schedule has ended"
    game.play_to(4)
    assert game.trainer.state.phase is Phase.TRAIN
    (last,) = game.role.log().read("0-0", 99, 0.0)[-1:]
    assert last.fragment is not None
    assert np.isnan(fragment.decode(last.fragment).columns["prey"]["log_prob"]).any()
    assert not balanced(game)["total"]["dropped"]


def test_rewards_are_scaled_on_arrival_without_replay_buffer(new_game: NewGame) -> None:
    """A replay buffer holds them as they were, and has them scaled as it draws."""
    game = new_game(three(heatup="0 env_steps"))
    game.worker.step(0)
    item = game.trainer.consumer.take(0, Phase.TRAIN, 0.0)
    assert item is not None
    before = {name: columns["reward"].copy() for name, columns in item.columns.items()}
    game.trainer.learner.emulate_acting([item], Phase.TRAIN)
    same = {name: np.array_equal(before[name], columns["reward"]) for name, columns in item.columns.items()}
    assert same == {"hunter": False, "prey": True, "watcher": True}


def test_policies_fork_from_several_runs_by_name(new_game: NewGame) -> None:
    one, other = new_game(three(heatup="0 env_steps")), new_game(three(seed=5))
    for game in (one, other):
        game.play_to(4)
    taken = {game.role.run_id: game.trainer.state.snapshot().checkpoint for game in (one, other)}
    first, second = taken.values()
    game = new_game(three(seed=9))
    untrained = state_arrays(game.trainer.learner.policies["hunter"])
    begun = forked(game.role, {"prey": Source(first, "prey"), "watcher": Source(second, "watcher")})

    def weights(checkpoint: Any, name: str) -> Any:
        return state_arrays(decode_policy(checkpoint.objects[f"{name}/policy.safetensors"])[0])

    for name, expected in (("prey", weights(first, "prey")), ("watcher", weights(second, "watcher"))):
        assert all(np.array_equal(array, weights(begun, name)[key]) for key, array in expected.items())
    assert all(np.array_equal(array, weights(begun, "hunter")[key]) for key, array in untrained.items())
    critics, theirs = (
        tensor_blob.decode(its.objects["trainer/prey.algorithm.safetensors"])[0] for its in (begun, first)
    )
    assert np.array_equal(critics["critics/weights.0"], theirs["critics/weights.0"])
    said = begun.manifest.provenance["initialized_from"]
    assert said["run_id"] == ", ".join(taken)
    assert "prey: prey of" in said["summary"] and said["summary"].endswith("statistics; it does not learn")
    for source, message in (
        (
            Source(first, "hunter"),
            "'hunter' of .* has other observation or action spaces than the agents of policies.prey",
        ),
        (Source(first, "pray"), "has no policy 'pray'; it has hunter, prey, watcher: name one for policies.prey"),
    ):
        with pytest.raises(ConfigError, match=message):
            forked(game.role, {"prey": source})


@pytest.mark.parametrize("name", ["Told", "AllAtOnce"])
def test_critics_of_several_policies_see_one_state(new_game: NewGame, name: str) -> None:
    sees = {"hidden_sizes": [8], "normalize_observations": True, "critic_observes": "state"}
    game = new_game(
        minimal_config(
            environment={"api": "pettingzoo", "id": f"{MODULE}:{name}", "num_envs": 2}, algorithm=PPO,
            policies={"one": sees, "other": sees}, agents={"ann": "one", "*": "other"}, stop_at={"updates": 3},
        )
    )  # fmt: skip
    game.finish()
    balanced(game)
    policy: Any = decode_policy(blob := game.latest().objects["other/policy.safetensors"])[0]
    own = policy.spaces.observation.own
    assert own.column_names("obs") == ("obs",) and len(policy.spaces.observation.leaves) > 1
    seen = {key: torch.from_numpy(array) for key, array in next(random_observations(policy.spaces.observation)).items()}
    acted, value = policy.action_parameters_and_value(seen)
    others = seen | {key: -array for key, array in seen.items() if "state().seen" in key}
    acted_again, other_value = policy.action_parameters_and_value(others)
    assert torch.equal(acted, acted_again) and (value != other_value).all()
    assert load_policy(blob).act(np.ones(3, np.float32)) in range(3)
    assert compare(policy, to_onnx(policy, {}), list(random_observations(own))).other_choices == 0
