"""CQL: its penalty against slow loops and an integral, its weight, its cloning, and that it learns from data."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rollout_worker.evaluation import evaluate_policies
from rollout_worker.making import describe_space
from shared.config import Config
from shared.errors import ConfigError, UnsupportedSpace
from shared.spaces import Array, PolicySpaces
from shared.steps import Counters
from tests.balancing import played, write_played
from tests.conftest import minimal_config
from tests.swinging import swung, uniform, write_swung
from tests.trainer_node.continuous import (
    BOXES,
    CHOICE,
    in_unit_box,
    made,
    minibatch,
    moved_apart,
    slow_actor,
    slow_critic,
)
from tests.trainer_node.game import NewGame, balanced, small
from trainer_node.algorithms.cql import CQL

BOTH = pytest.mark.parametrize("described", [BOXES, CHOICE], ids=["boxes", "choice"])
WEIGHT, ACTIONS = 2.5, 3


def make_cql(described: PolicySpaces = BOXES, **fields: Any) -> CQL:
    algorithm = made("cql", described, **{"conservatism": WEIGHT, "considered_actions": ACTIONS} | fields)
    assert isinstance(algorithm, CQL)
    moved_apart(algorithm.policy, algorithm.critics, algorithm.targets)
    return algorithm


def policys_action(params: Array, noise: Array) -> tuple[Array, float]:
    """A squashed normal's, in [-1, 1], and its log density there."""
    action = np.tanh(params[:2] + np.exp(params[2:]) * noise)
    normal = sum(-0.5 * z * z - log_std - 0.5 * math.log(2 * math.pi) for z, log_std in zip(noise, params[2:]))
    return action, float(normal - np.log(1 - action**2).sum())


def slow_soft_maximum(cql: CQL, which: int, sight: Array, after: Array, drawn: Array) -> float:
    """Of one row; `drawn` `[3, A, D]`."""
    if not drawn.size:
        return math.log(sum(math.exp(value) for value in slow_critic(cql.critics, which, sight)))
    total = 0.0
    for number in range(ACTIONS):
        now, then = (
            policys_action(slow_actor(cql.policy, seen), drawn[n, number]) for n, seen in ((1, sight), (2, after))
        )
        for action, density in ((drawn[0, number], math.log(0.25)), now, then):
            value = float(slow_critic(cql.critics, which, np.concatenate([sight, action]))[0])
            total += math.exp(value) / math.exp(density)
    return math.log(total / (3 * ACTIONS))


@BOTH
def test_the_critics_loss_is_that_of_a_slow_computation(described: PolicySpaces) -> None:
    cql, batch, discrete = make_cql(described), minibatch(described), described is CHOICE
    generator = torch.Generator().manual_seed(5)
    noise, _ = (cql.actions.noise(len(batch), generator).numpy() for _ in range(2))
    drawn = cql.soft_maximum.draw(len(batch), generator).numpy()
    expected = gap = 0.0
    for row in range(len(batch)):
        sight, after = (
            seen["obs"][row].numpy().astype(np.float64) for seen in (batch.observations, batch.next_observations)
        )
        taken = batch.actions["action"][row].numpy()
        params = slow_actor(cql.policy, after)
        if discrete:
            shares = np.exp(params) / np.exp(params).sum()
            then = float(shares @ np.minimum(*(slow_critic(cql.targets, n, after) for n in (0, 1))))
        else:
            action, _ = policys_action(params, noise[row])
            then = min(float(slow_critic(cql.targets, n, np.concatenate([after, action]))[0]) for n in (0, 1))
        aim = float(batch.reward[row]) + float(batch.discount[row]) * then
        for which in (0, 1):
            inputs = sight if discrete else np.concatenate([sight, in_unit_box(taken)])
            value = float(slow_critic(cql.critics, which, inputs)[int(taken) if discrete else 0])
            numbers = drawn if discrete else drawn[:, row]
            excess = slow_soft_maximum(cql, which, sight, after, numbers) - value
            expected += float(batch.weight[row]) * (0.5 * (value - aim) ** 2 + WEIGHT * excess) / len(batch)
            gap += excess / len(batch) / 2
    found = cql.learn(batch, Counters(), torch.Generator().manual_seed(5)).metrics
    assert float(found["train/critic_loss"]) == pytest.approx(expected, rel=1e-4)
    assert float(found["train/conservative_gap"]) == pytest.approx(gap, rel=1e-4)
    assert float(found["train/conservatism"]) == pytest.approx(WEIGHT)


def test_the_estimate_comes_to_the_integral_over_all_actions() -> None:
    cql, batch = make_cql(considered_actions=3000), minibatch(BOXES, rows=2)
    found = cql.soft_maximum.of(cql.critics, batch, cql.soft_maximum.draw(2, torch.Generator().manual_seed(1)))
    middles = (np.arange(100) + 0.5) / 50 - 1
    grid = np.stack(np.meshgrid(middles, middles), axis=-1).reshape(-1, 2)
    for row in range(2):
        sights = np.repeat(batch.observations["obs"][row : row + 1].numpy(), len(grid), axis=0)
        for which in (0, 1):
            values = slow_critic(cql.critics, which, np.concatenate([sights, grid], axis=1))[:, 0]
            integral = np.exp(values).mean() * 4
            assert float(found[which, row].detach()) == pytest.approx(math.log(integral), abs=0.05)


@BOTH
def test_the_penaltys_gradient_is_that_of_finite_differences_and_goes_to_the_critics_alone(
    described: PolicySpaces,
) -> None:
    cql, batch = make_cql(described), minibatch(described)
    cql.critics.to(torch.float64)
    inputs: Any = cql.critics.inputs
    inputs.forward = lambda sights, _: sights["obs"].to(torch.float64)
    drawn = cql.soft_maximum.draw(len(batch), torch.Generator().manual_seed(5))

    def penalty() -> torch.Tensor:
        values = cql.actions.value(cql.critics, batch.observations, batch.actions)
        return cql.gaps(batch, values, drawn).mean()

    if described is BOXES:  # float64 like the critics, so that the differences can be small
        policy: Any = cql.policy
        policy.bounds.flat = lambda actions: torch.from_numpy(in_unit_box(actions["action"].numpy()))
    bias = cql.critics.biases[1]
    penalty().backward()  # type: ignore[no-untyped-call]
    assert bias.grad is not None and all(tensor.grad is None for tensor in cql.policy.parameters())
    for place in np.ndindex(*bias.shape):
        sides = []
        for step in (1e-5, -2e-5):
            with torch.no_grad():
                bias[place] += step
                sides.append(float(penalty()))
        with torch.no_grad():
            bias[place] += 1e-5
        assert float(bias.grad[place]) == pytest.approx((sides[0] - sides[1]) / 2e-5, rel=1e-3, abs=1e-7)


@BOTH
def test_while_it_clones_the_policys_loss_is_the_likelihood_of_the_data_and_then_sacs(described: PolicySpaces) -> None:
    cql = make_cql(described, cloning_steps=2, initial_temperature=0.3, learning_rate=0.0)
    batch, generator, cloned = minibatch(described), torch.Generator().manual_seed(6), []
    plain = make_cql(described, initial_temperature=0.3)
    noise = cql.actions.noise(len(batch), torch.Generator().manual_seed(5))
    found, entropies = cql.actor_loss(batch, noise)
    with torch.no_grad():
        params = cql.policy.action_parameters(batch.observations)
        likelihood = cql.policy.distribution.log_prob(params, batch.actions)
    of_sac, of_sac_entropies = plain.actor_loss(batch, noise)
    torch.testing.assert_close(entropies, of_sac_entropies)
    expected = -(batch.weight * (likelihood + 0.3 * entropies)).mean()
    assert float(found.detach()) == pytest.approx(float(expected), rel=1e-5)
    assert float(found.detach()) != pytest.approx(float(of_sac.detach()), rel=1e-3)
    for cql.done in range(4):
        cql.learn(batch, Counters(), generator)  # moves nothing
        cloned.append(float(cql.actor_loss(batch, noise)[0].detach()) == float(found.detach()))
    assert cloned == [True, True, False, False]
    assert float(cql.actor_loss(batch, noise)[0].detach()) == float(of_sac.detach())


def test_entropy_is_in_the_values_where_that_is_asked_for() -> None:
    batch, noise = minibatch(BOXES), torch.zeros(9, 2)
    plain, soft, sac = make_cql(), make_cql(value_entropy=True), made("sac")
    moved_apart(sac.policy, sac.critics, sac.targets)
    assert torch.equal(soft.targets_of(batch, noise), sac.targets_of(batch, noise))
    assert not torch.allclose(plain.targets_of(batch, noise), sac.targets_of(batch, noise))


@pytest.mark.parametrize(("largest_gap", "goes"), [(-50.0, 1), (50.0, -1), (None, 0)])
def test_the_weight_goes_up_where_the_gap_is_too_large_and_else_down(largest_gap: float | None, goes: int) -> None:
    cql, generator = make_cql(largest_gap=largest_gap, conservatism_learning_rate=0.1), torch.Generator().manual_seed(1)
    for _ in range(3):
        cql.learn(minibatch(BOXES), Counters(), generator)
    assert float(cql.log_conservatism.exp()) == pytest.approx(WEIGHT * math.exp(0.3 * goes), rel=1e-3)
    for _ in range(200):
        cql._move_conservatism(torch.tensor(0.0))
    expected = {1: 1e6, -1: 1e-6, 0: WEIGHT}[goes]
    assert float(cql.log_conservatism.exp()) == pytest.approx(expected, rel=1e-3), (
        "it stays where it can come back from"
    )


@pytest.mark.parametrize("largest_gap", [0.7, 1.2])
def test_a_learnt_weight_brings_the_gap_to_what_is_asked_for(largest_gap: float) -> None:
    cql = make_cql(CHOICE, largest_gap=largest_gap, conservatism_learning_rate=0.03, learning_rate=3e-3)
    batch, generator = minibatch(CHOICE, rows=64), torch.Generator().manual_seed(1)
    gaps = [float(cql.learn(batch, Counters(), generator).metrics["train/conservative_gap"]) for _ in range(500)]
    assert np.mean(gaps[-100:]) == pytest.approx(largest_gap, abs=0.2)


def test_it_believes_in_no_action_that_the_data_do_not_have() -> None:
    """All the data's actions are in a quarter of the box, and rewards are the same everywhere."""
    outside, policy = [], {"hidden_sizes": (32, 32), "activation": "relu"}
    for algorithm in (
        made("cql", policy=policy, learning_rate=3e-3, conservatism=1.0),
        made("sac", policy=policy, learning_rate=3e-3),
    ):
        generator = torch.Generator().manual_seed(0)
        for step in range(150):
            batch = minibatch(BOXES, rows=64, seed=step)
            near = {"action": 0.5 * batch.actions["action"] + torch.tensor([1.0, 2.0])}
            batch = replace(batch, actions=near, reward=torch.ones(64), discount=torch.zeros(64))
            algorithm.learn(replace(batch, weight=torch.ones(64)), Counters(), generator)
        with torch.no_grad():
            far, known = (
                algorithm.critics(batch.observations, None, torch.full((64, 2), place)).mean() for place in (-0.5, 0.5)
            )
        outside.append(float(known - far))
    assert outside[0] > 1.0
    assert abs(outside[1]) < 0.5


def learning(path: Path, task: str, **sections: Any) -> Config:
    """The small run, from a CSV of one of the tasks."""
    if task == "CartPole-v1":
        write_played(path, played(6, greed=0.5, steps=50))
    else:
        write_swung(path, swung(4, uniform()))
    algorithm = {
        "name": "cql", "minibatch_size": 16, "gradient_steps_per_env_step": 0.05, "largest_gap": 1.0,
        "cloning_steps": 5, "considered_actions": 2, "memory": {"kind": "uniform", "capacity": 400},
    }  # fmt: skip
    dataset = {"path": str(path), "evaluation": {"every_updates": 0}}
    environment = {"id": task, "num_envs": 4}
    return small(algorithm=algorithm, dataset=dataset, environment=environment, archive="memory", **sections)


@pytest.mark.parametrize("task", ["CartPole-v1", "Pendulum-v1"])
def test_the_whole_run_dies_again_and_again_and_the_weights_are_the_same(
    new_game: NewGame, tmp_path: Path, task: str
) -> None:
    config = learning(tmp_path / "data.csv", task, stop_at={"updates": 8})
    whole = new_game(config)
    expected = whole.finish()
    game = new_game(config)
    for version in (1, 3, 6, 7):
        game.play_to(version)
        if version == 6:
            game.durable()
        game.lose()
    assert game.finish() == expected
    ours, theirs = (one.trainer._learner.algorithms["default"].state() for one in (whole, game))
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert "log_conservatism" in ours and ours["done"] > 5
    balanced(game)


@pytest.mark.parametrize(
    "action", [spaces.MultiDiscrete([2, 3]), spaces.Tuple((spaces.Discrete(2),) * 2)], ids=["several", "nested"]
)
def test_several_choices_are_refused(action: spaces.Space[Any]) -> None:
    described = PolicySpaces(BOXES.observation, describe_space(action))
    with pytest.raises(UnsupportedSpace, match=r"cql learns boxes or one discrete choice, .* or iql for recorded"):
        made("cql", described)


@pytest.mark.parametrize(
    ("fields", "sections", "words"),
    [
        ({"conservatism": 0}, {}, "algorithm.conservatism"),
        ({"considered_actions": 0}, {}, "algorithm.considered_actions"),
        ({"cloning_steps": -1}, {}, "algorithm.cloning_steps"),
        ({"memory": {"kind": "uniform", "capacity": 100}}, {}, "minibatch_size=256 is more than the memory holds"),
        ({}, {"trainer": {"ranks": 2}}, "cql learns in one process"),
        ({"expectile": 0.7}, {}, "algorithm.expectile"),
    ],
)
def test_what_cannot_learn_is_refused(fields: dict[str, Any], sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        minimal_config(algorithm={"name": "cql", **fields}, **sections)


def score(new_game: NewGame, path: Path, algorithm: dict[str, Any]) -> float:
    """Greedy mean return of CartPole after a short run from this dataset."""
    config = minimal_config(
        algorithm=algorithm,
        dataset={"path": str(path), "evaluation": {"every_updates": 0}},
        rollout={"fragment_steps": 32, "fragments_per_update": 2},
        environment={"id": "CartPole-v1", "num_envs": 8},
        policies={"default": {"normalise_observations": True, "hidden_sizes": [32]}},
        stop_at={"updates": 36},
    )
    game = new_game(config)
    game.finish()
    found = evaluate_policies(config, game.role.description(), game.trainer._learner.policies, 0, 8)
    return float(found.as_dict()["mean_return"])


@pytest.mark.learning
def test_it_does_better_than_who_acted_its_data_and_than_their_clone(new_game: NewGame, tmp_path: Path) -> None:
    listed = played(100, greed=0.1, steps=300)
    mean = float(np.mean([len(episode) for episode in listed]))
    write_played(tmp_path / "data.csv", listed)
    cql = {
        "name": "cql", "minibatch_size": 64, "gamma": 0.95, "learning_rate": 3e-3, "conservatism": 0.5,
        "gradient_steps_per_env_step": 0.05, "memory": {"kind": "uniform", "capacity": 20_000},
    }  # fmt: skip
    clone = {"name": "bc", "minibatch_size": 64, "learning_rate": 3e-3}
    scores = {kind["name"]: score(new_game, tmp_path / "data.csv", kind) for kind in (cql, clone)}
    assert scores["cql"] > 2 * mean and scores["cql"] > 1.5 * scores["bc"], (mean, scores)
