"""Off-policy evaluation of a policy on recorded CartPole, against episodes that the policy itself plays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rollout_worker.environments import make_vector
from rollout_worker.exploration import RandomActing, Sampling
from rollout_worker.making import describe_environment
from rollout_worker.sampler import Sampler
from rollout_worker.trail import Life
from shared.config import PolicyConfig
from shared.datasets.recording import Episode
from shared.fragment import WIRE_VERSION
from shared.policies.actor_critic import ActorCritic
from shared.spaces import Array
from tests.balancing import RULE, played, write_played
from tests.conftest import minimal_config
from tests.environments_for_tests import MODULE
from tests.shared.datasets import fragment_of, write_archive
from tests.swinging import swung, write_swung
from tests.trainer_node.continuous import made
from trainer_node.data_evaluation import DataEvaluation, evaluate

GAMMA = 0.9


def policy_of(sharpness: float) -> ActorCritic:
    """Pushes to the right with probability sigmoid(sharpness × the rule's sum)."""
    spaces = describe_environment(minimal_config()).policies["default"]
    policy = ActorCritic(spaces, PolicyConfig(hidden_sizes=()))
    with torch.no_grad():
        policy.head.weight.zero_()
        policy.head.weight[1] = torch.from_numpy(RULE * sharpness).to(torch.float32)
    return policy


def true_value(policy: ActorCritic, episodes: int = 60) -> float:
    """Mean discounted return of episodes that it plays."""
    environment, generator, found = gym.make("CartPole-v1"), np.random.default_rng(9), []
    weights = policy.head.weight[1].detach().numpy()
    for number in range(episodes):
        observation, _ = environment.reset(seed=number)
        total, discount, ended = 0.0, 1.0, False
        while not ended and discount > 1e-4:
            right = 1 / (1 + np.exp(-(weights @ observation)))
            observation, reward, terminated, truncated, _ = environment.step(int(generator.random() < right))
            total, discount, ended = total + discount * float(reward), discount * GAMMA, terminated or truncated
        found.append(total)
    environment.close()
    return float(np.mean(found))


@pytest.fixture(scope="module")
def recorded() -> list[Episode]:
    """Played almost at random: most of them fall soon, and some are stopped."""
    return played(150, greed=0.2, steps=60)


@pytest.mark.parametrize(("sharpness", "worth"), [(-8.0, 6.5), (4.0, 9.9)])
def test_a_better_and_a_worse_policy_are_told_apart(recorded: list[Episode], sharpness: float, worth: float) -> None:
    policy = policy_of(sharpness)
    truth = true_value(policy)
    assert truth == pytest.approx(worth, abs=0.5)
    found = evaluate(policy, recorded, GAMMA, 1000, seed=1)
    assert found["ope/dm"] == pytest.approx(truth, abs=0.7)
    assert found["ope/sequential_dr"] == pytest.approx(truth, abs=0.7)
    assert 1 <= found["ope/effective_episodes"] < 20, "so far from what acted that weights alone tell little"
    assert all(np.isfinite(value) for value in found.values()) and len(found) == 7


def settings(path: Path, **evaluation: Any) -> DataEvaluation:
    return DataEvaluation(
        minimal_config(algorithm={"name": "bc"}, dataset={"path": str(path), "evaluation": evaluation})
    )


def test_it_is_due_every_so_many_updates_and_says_the_same_again(tmp_path: Path) -> None:
    write_played(tmp_path / "data.csv", played(9, greed=0.5, steps=30))
    policy = policy_of(1.0)
    source = settings(tmp_path / "data.csv", every_updates=4, gradient_steps=20, episodes=5)
    assert [updates for updates in range(9) if source.figures(policy, updates)] == [4, 8]
    assert source.figures(policy, 4) == source.figures(policy, 8)
    assert source._episodes is not None and len(source._episodes) == 5
    assert not settings(tmp_path / "data.csv", every_updates=0).figures(policy, 4)


def test_without_the_datas_probabilities_only_the_model_is_asked(recorded: list[Episode]) -> None:
    unknown = [
        Episode(
            item.observations, item.actions, item.reward, np.full_like(item.log_prob, np.nan), item.terminated, None
        )
        for item in recorded[:5]
    ]
    found = evaluate(policy_of(1.0), unknown, GAMMA, 10, seed=1)
    assert set(found) == {"ope/dm", "ope/episodes_left_out"} and found["ope/episodes_left_out"] == 5


@pytest.mark.parametrize("version", [2, WIRE_VERSION])
def test_heat_up_counts_with_its_own_probabilities_or_not_at_all(tmp_path: Path, version: int) -> None:
    """A lever pays 1, and the policy pulls it with probability 0.9; half of the archive is heat-up, half another's."""
    config = minimal_config(environment={"id": f"{MODULE}:Lever", "num_envs": 50})
    description = describe_environment(config)
    policy, acting = (ActorCritic(description.policies["default"], PolicyConfig(hidden_sizes=())) for _ in range(2))
    with torch.no_grad():
        for made, chance in ((policy, 0.9), (acting, 0.7)):
            made.head.bias.copy_(torch.tensor([np.log(1 - chance), np.log(chance)]))
    sampler = Sampler(make_vector(config.environment, description), description, Life(1, 0, 0, 0))
    fragments = []
    for seq, exploration in enumerate([RandomActing(), Sampling()] * 5):
        columns = sampler.sample({"default": acting}, exploration, 8).columns["default"]
        if version == 2 and seq % 2 == 0:
            columns["log_prob"][:] = 0.0
        item = fragment_of(columns, seq)
        fragments.append(replace(item, header=replace(item.header, wire_version=version)))
    write_archive(tmp_path, fragments)
    found = settings(tmp_path / "a-run", every_updates=1, gradient_steps=200, episodes=4000).figures(policy, 1)
    assert found["ope/episodes_left_out"] == (2000 if version == 2 else 0)
    for name in ("ips", "wis", "dr", "sequential_dr"):
        assert found[f"ope/{name}"] == pytest.approx(0.9, abs=0.05), name


def test_a_dataset_that_is_gone_ends_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = settings(tmp_path / "gone.csv", every_updates=1)
    assert source.figures(policy_of(1.0), 1) == {} and source.figures(policy_of(1.0), 2) == {}
    assert "no off-policy evaluation" in caplog.text and caplog.text.count("gone.csv") == 1


def test_a_policy_of_bounded_actions_is_worth_what_its_own_episodes_returned(tmp_path: Path) -> None:
    """Each weight is 1, since the densities are of actions in the environment's units on both sides."""
    policy = made(
        "cql", describe_environment(minimal_config(environment={"id": "Pendulum-v1"})).policies["default"]
    ).policy
    drawing = torch.Generator().manual_seed(0)

    def choose(observation: Array) -> tuple[Array, float]:
        with torch.no_grad():
            params = policy.action_parameters({"obs": torch.from_numpy(observation[None])})
            action = policy.distribution.sample(params, drawing)
            return action["action"][0].numpy(), float(policy.distribution.log_prob(params, action))

    listed = swung(4, choose)
    write_swung(tmp_path / "data.csv", listed)
    found = settings(tmp_path / "data.csv", every_updates=1, gradient_steps=20).figures(policy, 1)
    assert found["ope/effective_episodes"] == pytest.approx(4, rel=1e-3)
    assert found["ope/wis"] == pytest.approx(found["ope/ips"], rel=1e-3)
