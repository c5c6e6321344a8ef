"""Evaluation: exactly the episodes asked for, each environment its share, the same from the same seeds."""

from __future__ import annotations

from typing import Any, cast

import gymnasium as gym
import numpy as np
import pytest
import torch

from rollout_worker.environments import make_vector
from rollout_worker.evaluation import (
    CONFIRMING,
    SCORING,
    Scores,
    evaluate_policies,
    evaluation_seed,
    play,
)
from rollout_worker.making import describe_environment, evaluation_environment
from rollout_worker.trail import episode_seed
from shared.checkpoint import checkpoint_name
from shared.config import Config
from shared.errors import EnvironmentFailure
from shared.fragment import EpisodeRecord
from shared.policies.deployed import DeployedPolicy
from shared.policies.policy import Policy
from shared.policies.recurrent import RecurrentActorCritic
from shared.policies.registry import build_policies
from tests.conftest import minimal_config
from tests.environments_for_tests import MODULE


def config_of(environment: dict[str, Any], **evaluation: Any) -> Config:
    return minimal_config(environment={"num_envs": 8} | environment, evaluation=evaluation)


def policies_of(config: Config) -> dict[str, Policy]:
    return build_policies(describe_environment(config).policies, config.policies, config.algorithm, seed=0)


def scores_of(
    config: Config, episodes: int | None = None, policies: dict[str, Policy] | None = None, seed: int = 10_000
) -> Scores:
    return evaluate_policies(config, describe_environment(config), policies or policies_of(config), seed, episodes)


@pytest.mark.parametrize(("episodes", "copies"), [(1, 4), (5, 4), (8, 4), (7, 3)])
def test_exactly_the_episodes_asked_for_are_played(episodes: int, copies: int) -> None:
    config = config_of({"id": f"{MODULE}:Counting", "kwargs": {"length": 3}}, episodes=episodes, num_envs=copies)
    scores = scores_of(config)
    assert [record.length for record in scores.episodes] == [3] * episodes
    assert scores_of(config, episodes=2).as_dict()["episodes"] == 2


def test_each_environment_plays_its_share_however_short_its_episodes_are() -> None:
    config = config_of({"id": f"{MODULE}:counting_vector", "vectorization": "native", "num_envs": 3})
    config = config.model_copy(
        update={"environment": config.environment.model_copy(update={"kwargs": {"mode": "DISABLED"}})}
    )
    description = describe_environment(config_of({"id": f"{MODULE}:Counting"}))
    vector = make_vector(config.environment, description)
    scores = play(vector, description, policies_of(config_of({"id": f"{MODULE}:Counting"})), 7, greedy=True, seed=0)
    assert [record.length for record in scores.episodes] == [2, 2, 3, 3, 4, 4, 4]


def test_an_observation_of_nan_is_no_score() -> None:
    with pytest.raises(
        EnvironmentFailure, match=r"an observation \(default/obs\) that cannot be learned from: it holds NaN"
    ):
        scores_of(config_of({"id": f"{MODULE}:Spoils", "kwargs": {"what": "observation"}}, episodes=3, num_envs=1))


def test_the_same_seeds_give_the_same_episodes() -> None:
    config = config_of({"id": "CartPole-v1"}, episodes=6, greedy=False)
    policies = policies_of(config)
    assert scores_of(config, policies=policies) == scores_of(config, policies=policies)
    assert scores_of(config, policies=policies, seed=5) != scores_of(config, policies=policies)


def test_each_checkpoint_and_round_begins_elsewhere_unless_the_seed_is_fixed() -> None:
    names = [checkpoint_name(version, 64 * version) for version in range(3)]

    def seeds(**sections: Any) -> list[int]:
        config = minimal_config(**sections)
        found = [evaluation_seed(config, name, turn) for name in names for turn in (SCORING, CONFIRMING)]
        assert found == [evaluation_seed(config, name, turn) for name in names for turn in (SCORING, CONFIRMING)]
        return found

    assert len({*seeds(seed=1), *seeds(seed=2)}) == 12
    fixed = seeds(evaluation={"seed": 7})
    assert fixed[:2] * 3 == fixed and fixed[0] != fixed[1], "the same for all checkpoints, others to confirm"


def test_the_global_random_state_does_not_matter() -> None:
    config = config_of({"id": "CartPole-v1"}, episodes=4, greedy=False)
    torch.manual_seed(1)
    np.random.seed(1)
    first = scores_of(config)
    torch.manual_seed(2)
    np.random.seed(2)
    assert scores_of(config) == first


def test_greedy_plays_the_mode_and_sampling_does_not() -> None:
    environment = {"id": f"{MODULE}:Target"}
    greedy, sampled = config_of(environment, episodes=50), config_of(environment, episodes=50, greedy=False)
    policies = policies_of(greedy)
    with torch.no_grad():
        policies["default"].get_parameter("head.weight").zero_()
        policies["default"].get_parameter("head.bias").fill_(0.5)
    best, spread = scores_of(greedy, policies=policies).as_dict(), scores_of(sampled, policies=policies).as_dict()
    assert best["mean_return"] == best["min_return"] == 0.0
    assert spread["std_return"] > 0.1 and spread["mean_return"] < -0.3


def test_the_training_environment_is_taken_with_the_evaluations_arguments_and_copies() -> None:
    kwargs = {"length": 3, "message": "kept"}
    config = config_of({"id": f"{MODULE}:Counting", "kwargs": kwargs}, episodes=2, num_envs=5, kwargs={"length": 9})
    made = evaluation_environment(config)
    assert made.kwargs == {"length": 9, "message": "kept"} and made.num_envs == 2 and made.vectorization == "sync"
    assert [record.length for record in scores_of(config).episodes] == [9, 9]


def test_the_evaluations_wrappers_stand_in_place_of_those_of_training() -> None:
    trained_in = {"id": f"{MODULE}:Counting", "wrappers": [f"{MODULE}:AddOne"]}

    def returns(**evaluation: Any) -> list[float]:
        scores = scores_of(config_of(trained_in, episodes=2, num_envs=2, **evaluation))
        return [record.episode_return for record in scores.episodes]

    assert returns() == [9.0, 9.0]
    assert returns(wrappers=[]) == [6.0, 6.0]
    assert returns(wrappers=[{"path": f"{MODULE}:AddOne", "kwargs": {"amount": 10.0}}]) == [36.0, 36.0]


def test_scores_sum_up_what_was_played() -> None:
    records = (
        EpisodeRecord(1.0, 10, success=True, metrics={"depth": 2.0}),
        EpisodeRecord(4.0, 20, success=False, metrics={"depth": 4.0, "speed": 7.0}),
        EpisodeRecord(7.0, 30, success=None),
    )
    assert Scores(records).as_dict() == {
        "episodes": 3, "mean_return": 4.0, "std_return": pytest.approx(6**0.5), "min_return": 1.0, "max_return": 7.0,
        "mean_length": 20.0, "success_rate": 0.5, "metrics": {"depth": 3.0, "speed": 7.0},
    }  # fmt: skip
    assert Scores(records[2:]).as_dict()["success_rate"] is None
    assert Scores((EpisodeRecord(0.99, 14),) * 20).as_dict()["std_return"] == 0, "no rounding shows as spread"


def test_agents_of_one_environment_are_evaluated_together() -> None:
    config = minimal_config(
        environment={"id": f"{MODULE}:Chase", "api": "pettingzoo"},
        policies={"hunter": {}, "prey": {}},
        agents={"cat": "hunter", "mouse": "prey"},
        evaluation={"episodes": 3, "num_envs": 2},
    )
    scores = scores_of(config)
    assert [record.length for record in scores.episodes] == [4, 4, 4]
    assert set(scores.episodes[0].agent_returns) == {"cat", "mouse"}


def test_a_failing_environment_is_told_by_name() -> None:
    with pytest.raises(EnvironmentFailure, match="environment 0 raised ValueError in step: the gripper is stuck"):
        scores_of(config_of({"id": f"{MODULE}:Counting", "kwargs": {"fails": "step"}}, episodes=2))


def test_a_policy_with_a_core_remembers_within_each_episode_and_not_across() -> None:
    policy = {"core": "lstm", "core_size": 6, "share_encoder": True}
    config = minimal_config(
        environment={"id": "Pendulum-v1", "max_episode_steps": 30}, policies={"default": policy},
        evaluation={"episodes": 7, "num_envs": 3},
    )  # fmt: skip
    policies = policies_of(config)
    with torch.no_grad():
        cast(RecurrentActorCritic, policies["default"]).head.weight.mul_(100)
    found = scores_of(config, policies=policies)
    returns = []
    for copy, share in enumerate((2, 2, 3)):
        env = gym.make("Pendulum-v1", max_episode_steps=30)
        acting, first = DeployedPolicy(policies["default"], 0), 10_000 + copy
        for episode in range(share):
            acting.reset()
            observation, _ = env.reset(seed=episode_seed(first, episode))
            over, total = False, 0.0
            while not over:
                observation, reward, terminated, truncated, _ = env.step(acting.act(observation))
                over, total = terminated or truncated, total + float(reward)
            returns.append(total)
    assert [record.episode_return for record in found.episodes] == pytest.approx(returns, rel=1e-4)
