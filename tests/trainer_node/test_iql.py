"""IQL: its losses against slow loops, its exact resume, and that it does better than who acted its data."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rollout_worker.evaluation import evaluate_policies
from rollout_worker.making import describe_space
from shared.algorithm_configs.iql import IQLConfig
from shared.spaces import PolicySpaces
from shared.steps import Counters
from tests.balancing import played, write_played
from tests.conftest import minimal_config
from tests.trainer_node.continuous import BOXES, CHOICE, fragment, made, minibatch, moved_apart, slow_critic
from tests.trainer_node.game import NewGame, balanced, small
from trainer_node.algorithms.iql import IQL

BOTH = pytest.mark.parametrize("described", [CHOICE, BOXES], ids=["choice", "boxes"])


def make_iql(described: PolicySpaces, **config: Any) -> IQL:
    algorithm = made("iql", described, largest_weight=1.5, **config)
    assert isinstance(algorithm, IQL)
    moved_apart(algorithm.policy, algorithm.critics, algorithm.targets)
    return algorithm


@BOTH
@torch.no_grad()
def test_the_losses_are_those_of_the_paper(described: PolicySpaces) -> None:
    algorithm, batch = make_iql(described), minibatch(described, rows=12, weighted=False)
    policy, config = algorithm.policy, algorithm._config
    value_loss = policy_loss = critic_loss = 0.0
    for row in range(12):
        seen = {"obs": batch.observations["obs"][row : row + 1]}
        done = {"action": batch.actions["action"][row : row + 1]}
        chosen = done["action"][0].numpy()
        told = np.concatenate([seen["obs"][0].numpy(), np.eye(4)[chosen] if described is CHOICE else chosen])
        q = min(float(slow_critic(algorithm.targets, which, told)[0]) for which in (0, 1))
        advantage = q - float(policy.value(seen))
        value_loss += abs(config.expectile - (advantage < 0)) * advantage**2
        weight = min(np.exp(config.inverse_temperature * advantage), 1.5)
        policy_loss -= weight * float(policy.distribution.log_prob(policy.action_parameters(seen), done))
        after = float(policy.value({"obs": batch.next_observations["obs"][row : row + 1]}))
        target_of = float(batch.reward[row]) + float(batch.discount[row]) * after
        critic_loss += sum((float(slow_critic(algorithm.critics, n, told)[0]) - target_of) ** 2 for n in (0, 1))
    loss, metrics = algorithm.policy_loss(batch)
    assert float(metrics["train/value_loss"]) == pytest.approx(value_loss / 12, rel=1e-4)
    assert float(metrics["train/policy_loss"]) == pytest.approx(policy_loss / 12, rel=1e-4)
    assert float(loss) == pytest.approx((value_loss + policy_loss) / 12, rel=1e-4)
    assert float(algorithm.critic_loss(batch)[0]) == pytest.approx(critic_loss / 12, rel=1e-4)


def test_choices_and_boxes_may_be_nested() -> None:
    action = spaces.Dict({"go": spaces.MultiDiscrete([2, 3]), "how": spaces.Box(-1.0, 1.0, (2,))})
    described = PolicySpaces(BOXES.observation, describe_space(action))
    algorithm = made("iql", described)
    assert algorithm.critics.weights[0].shape[1] == 3 + 2 + 3 + 2
    for update in range(3):
        metrics = algorithm.update([fragment(algorithm.policy, update)], Counters(env_steps=100, updates=update))
    assert algorithm.done == 10 and all(np.isfinite(value) for value in metrics.values())


def test_without_a_temperature_it_is_cloning() -> None:
    algorithm, batch = make_iql(CHOICE, inverse_temperature=0.0), minibatch(CHOICE, weighted=False)
    _, metrics = algorithm.policy_loss(batch)
    params = algorithm.policy.action_parameters(batch.observations).detach()
    expected = torch.nn.functional.cross_entropy(params, batch.actions["action"])
    assert float(metrics["train/policy_loss"]) == pytest.approx(float(expected), rel=1e-5)


def learning(path: Path, **sections: Any) -> dict[str, Any]:
    memory = {"kind": "uniform", "capacity": 20_000}
    algorithm = {"name": "iql", "minibatch_size": 16, "memory": memory, "gradient_steps_per_env_step": 0.05}
    dataset = {"path": str(path), "evaluation": {"every_updates": 0}}
    return {"algorithm": algorithm, "dataset": dataset} | sections


def test_the_whole_run_dies_at_every_version_and_the_weights_are_the_same(new_game: NewGame, tmp_path: Path) -> None:
    write_played(tmp_path / "data.csv", played(6, greed=0.5, steps=50))
    config = small(**learning(tmp_path / "data.csv", stop_at={"updates": 8}, archive="memory"))
    expected = new_game(config).finish()
    game = new_game(config)
    game.lose_at(range(1, 8))
    assert game.finish() == expected
    balanced(game)


def test_it_does_better_than_who_acted_its_data(new_game: NewGame, tmp_path: Path) -> None:
    listed = played(100, greed=0.3, steps=300)
    mean = float(np.mean([len(episode) for episode in listed]))
    assert mean < 80
    write_played(tmp_path / "data.csv", listed)
    config = minimal_config(
        **learning(tmp_path / "data.csv"),
        rollout={"fragment_steps": 32, "fragments_per_update": 2},
        environment={"id": "CartPole-v1", "num_envs": 8},
        policies={"default": {"normalise_observations": True, "hidden_sizes": [32]}},
        stop_at={"updates": 36},
    )
    section = cast(IQLConfig, config.algorithm)
    rate = section.learning_rate.model_copy(update={"start": 3e-3})
    faster = {"minibatch_size": 64, "gamma": 0.95, "learning_rate": rate}
    config = config.model_copy(update={"algorithm": section.model_copy(update=faster)})
    game = new_game(config)
    game.finish()
    scores = evaluate_policies(config, game.role.description(), game.trainer._learner.policies, 0, 8).as_dict()
    assert scores["mean_return"] > 2 * mean
