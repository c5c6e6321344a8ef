"""BC, CQL and IQL: what they learn from recorded experience; losses that other libraries have are in against_others."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from stagecoach.rollout_worker.environments.description import describe_space
from stagecoach.rollout_worker.evaluator import scores_of
from stagecoach.rollout_worker.playing import evaluate_policies
from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.experience.spaces import PolicySpaces
from stagecoach.shared.policies.serialization import state_arrays
from stagecoach.trainer_node.learning.algorithms.cql import CQL
from stagecoach.trainer_node.learning.algorithms.iql import IQL
from stagecoach.trainer_node.learning.algorithms.off_policy import Minibatch
from stagecoach.trainer_node.learning.building_blocks.interface import Experience
from tests.conftest import minimal_config
from tests.support.experience.cartpole_data import played, write_played
from tests.support.learning.algorithms import BOXES, SEEN, make, move_apart, on_both_spaces
from tests.support.learning.experience import minibatch, random_fragment
from tests.support.runs.game import NewGame

CHOICES = PolicySpaces(SEEN, describe_space(spaces.MultiDiscrete([4, 2])))
BOX = PolicySpaces(SEEN, describe_space(spaces.Box(-1.0, 1.0, (2,))))
both = pytest.mark.parametrize("described", [CHOICES, BOX], ids=["choices", "box"])


def make_bc(described: PolicySpaces, **config: Any) -> tuple[Any, Experience]:
    """And a fragment of random content, a quarter of it padding."""
    policy = {"hidden_sizes": (16,), "log_std_init": -0.3, "normalize_observations": True}
    algorithm = make("bc", described, policy, minibatch_size=8, **config)
    item = random_fragment(algorithm.policy, 0, 8, 4)
    item.columns["mask"] = np.arange(8)[:, None] < np.array([8, 8, 6, 2])
    return algorithm, item


@both
def test_bc_loss_is_unlikelihood_minus_weighted_entropy(described: PolicySpaces) -> None:
    algorithm, item = make_bc(described, entropy_coefficient=0.3)
    batch = algorithm.batch({name: torch.from_numpy(array) for name, array in item.columns.items()})
    assert len(batch) == 24
    loss, terms = algorithm.loss(batch)
    params, distribution = algorithm.policy.action_parameters(batch.observations), algorithm.policy.distribution
    unlikelihood, entropy = -distribution.log_prob(params, batch.actions).mean(), distribution.entropy(params).mean()
    torch.testing.assert_close(terms["train/negative_log_likelihood"], unlikelihood.detach())
    torch.testing.assert_close(terms["train/entropy"], entropy.detach())
    torch.testing.assert_close(loss, unlikelihood - 0.3 * entropy)


@both
def test_only_the_actor_moves_and_it_moves_towards_the_data(described: PolicySpaces) -> None:
    algorithm, item = make_bc(described, learning_rate=0.02, epochs=10)
    before = state_arrays(algorithm.policy)
    first, *_, last = (algorithm.update([item], Counters(updates=update)) for update in range(12))
    assert last["train/negative_log_likelihood"] < first["train/negative_log_likelihood"] - 0.3
    assert last["train/gradient_steps"] == 30 and last["train/action_error"] < first["train/action_error"]
    moved = {name for name, array in state_arrays(algorithm.policy).items() if not np.array_equal(array, before[name])}
    assert any(name.startswith("head") for name in moved)
    assert not any(name.startswith(("critic", "value_head")) for name in moved)


def test_nothing_but_padding_is_no_step() -> None:
    algorithm, item = make_bc(CHOICES)
    item.columns["mask"][:] = False
    assert algorithm.update([item], Counters())["train/gradient_steps"] == 0


def test_choices_and_boxes_may_be_nested() -> None:
    action = spaces.Dict({"go": spaces.MultiDiscrete([2, 3]), "how": spaces.Box(-1.0, 1.0, (2,))})
    described = PolicySpaces(BOXES.observation, describe_space(action))
    algorithm = make("iql", described)
    assert algorithm.critics.weights[0].shape[1] == 3 + 2 + 3 + 2
    for update in range(3):
        metrics = algorithm.update([random_fragment(algorithm.policy, update)], Counters(env_steps=100, updates=update))
    assert algorithm.done == 10 and all(np.isfinite(value) for value in metrics.values())


@on_both_spaces
def test_each_loss_of_iql_counts_a_row_by_its_weight(described: PolicySpaces) -> None:
    iql, batch = make("iql", described), minibatch(described)
    assert isinstance(iql, IQL)
    move_apart(iql.policy, iql.critics, iql.targets)
    losses: list[Callable[[Minibatch], Tensor]] = [
        lambda its: iql.policy_loss(its)[0],
        lambda its: iql.critic_loss(its)[0],
    ]
    for loss in losses:
        alone = [loss(replace(batch, weight=torch.eye(len(batch))[row])) for row in range(len(batch))]
        torch.testing.assert_close(
            loss(batch), sum(weight * its for weight, its in zip(batch.weight, alone, strict=True))
        )


# CQL

WEIGHT = 2.5


def make_cql(described: PolicySpaces = BOXES, **fields: Any) -> CQL:
    algorithm = make("cql", described, **{"conservatism": WEIGHT, "considered_actions": 3} | fields)
    assert isinstance(algorithm, CQL)
    move_apart(algorithm.policy, algorithm.critics, algorithm.targets)
    return algorithm


@on_both_spaces
def test_cql_critic_loss_adds_weighted_gap_and_spares_policy(described: PolicySpaces) -> None:
    cql, batch = make_cql(described), minibatch(described)
    generator = torch.Generator().manual_seed(5)
    noise, _ = (cql.actions.noise(len(batch), generator) for _ in range(2))
    loss, _, _, gaps = cql.penalized_loss(batch, noise, cql.draw(len(batch), generator))
    penalty = WEIGHT * (batch.weight * gaps).mean(dim=1).sum()
    torch.testing.assert_close(loss, cql.critic_loss(batch, noise)[0] + penalty)
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(tensor.grad is None for network in (cql.policy, cql.targets) for tensor in network.parameters())
    found = cql.learn(batch, Counters(), torch.Generator().manual_seed(5)).metrics
    expected = [loss.item(), gaps.mean().item(), WEIGHT]
    names = ("train/critic_loss", "train/conservative_gap", "train/conservatism")
    assert [float(found[name]) for name in names] == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def test_cql_estimate_converges_to_integral_over_actions() -> None:
    cql, batch = make_cql(considered_actions=3000), minibatch(BOXES, rows=2)
    found = cql.soft_maximum(batch, cql.draw(2, torch.Generator().manual_seed(1)))
    middles = (torch.arange(100) + 0.5) / 50 - 1
    grid = torch.cartesian_prod(middles, middles)
    values = cql.critics.of_each(batch.observations, None, grid.expand(2, -1, -1))
    torch.testing.assert_close(found, (4 * values.exp().mean(dim=2)).log(), atol=0.05, rtol=0)


@on_both_spaces
def test_cql_policy_loss_is_likelihood_first_and_then_sacs(described: PolicySpaces) -> None:
    batch, generator = minibatch(described), torch.Generator().manual_seed(6)
    cql, plain = (make_cql(described, cloning_steps=steps, learning_rate=0.0) for steps in (2, 0))
    noise = cql.actions.noise(len(batch), torch.Generator().manual_seed(5))

    def lost(algorithm: CQL) -> float:
        return float(algorithm.actor_loss(batch, noise)[0].detach())

    params, found = cql.policy.action_parameters(batch.observations), [lost(cql)]
    likelihood, entropies = cql.policy.distribution.log_prob(params, batch.actions), cql.actor_loss(batch, noise)[1]
    expected = -(batch.weight * (likelihood + cql.log_temperature.exp() * entropies)).mean()
    assert found[0] == pytest.approx(float(expected.detach()), rel=1e-5)
    for cql.done in range(4):
        cql.learn(batch, Counters(), generator)  # moves nothing but the temperature's optimizer
        found.append(lost(cql))
    assert found == [found[0]] * 3 + [lost(plain)] * 2 and found[0] != found[3]


def test_entropy_is_in_the_values_where_that_is_asked_for() -> None:
    batch, noise = minibatch(BOXES), torch.zeros(9, 2)
    plain, soft, sac = make_cql(), make_cql(value_entropy=True), make("sac")
    move_apart(sac.policy, sac.critics, sac.targets)
    assert torch.equal(soft.targets_of(batch, noise), sac.targets_of(batch, noise))
    assert not torch.allclose(plain.targets_of(batch, noise), sac.targets_of(batch, noise))


@pytest.mark.parametrize(("largest_gap", "goes"), [(-50.0, 1), (50.0, -1), (None, 0)])
def test_cql_weight_follows_the_gap(largest_gap: float | None, goes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagecoach.trainer_node.learning.algorithms.cql._WEIGHT_LEARNING_RATE", 0.1)
    cql, generator = make_cql(largest_gap=largest_gap), torch.Generator().manual_seed(1)
    for _ in range(3):
        cql.learn(minibatch(BOXES), Counters(), generator)
    assert float(cql.log_conservatism.exp()) == pytest.approx(WEIGHT * math.exp(0.3 * goes), rel=1e-3)
    for _ in range(200):
        cql.move_conservatism(torch.tensor(0.0))
    expected = {1: 1e6, -1: 1e-6, 0: WEIGHT}[goes]  # from where it can come back
    assert float(cql.log_conservatism.exp()) == pytest.approx(expected, rel=1e-3)


# Playing CartPole from data


def score(new_game: NewGame, path: Path, algorithm: dict[str, Any], updates: int = 36) -> float:
    """Greedy mean return after a short run from this dataset."""
    config = minimal_config(
        algorithm={"minibatch_size": 64, "learning_rate": 3e-3} | algorithm,
        dataset={"path": str(path), "evaluation": {"every_updates": 0}},
        rollout={"fragment_steps": 32, "fragments_per_update": 2},
        environment={"id": "CartPole-v1", "num_envs": 8},
        policies={"default": {"normalize_observations": True, "hidden_sizes": [32]}},
        stop_at={"updates": updates},
    )
    game = new_game(config)
    game.finish()
    found = evaluate_policies(config, game.role.description(), game.trainer.learner.policies, 0, 8)
    return float(scores_of(config, found)["mean_return"])


def test_bc_comes_to_play_what_was_recorded(new_game: NewGame, tmp_path: Path) -> None:
    write_played(tmp_path / "data.csv", played(12, steps=500))
    assert score(new_game, tmp_path / "data.csv", {"name": "bc", "epochs": 2}, updates=60) >= 400


@pytest.mark.parametrize(
    ("fields", "greed", "over_bc"),
    [
        ({"name": "iql"}, 0.3, 0.0),
        pytest.param({"name": "cql", "conservatism": 0.5}, 0.1, 1.5, marks=pytest.mark.learning),
    ],
)
def test_offline_learning_beats_the_behavior_and_its_clone(
    new_game: NewGame, tmp_path: Path, fields: dict[str, Any], greed: float, over_bc: float
) -> None:
    listed = played(100, greed=greed, steps=300)
    write_played(tmp_path / "data.csv", listed)
    replayed = {"gradient_steps_per_env_step": 0.05, "replay_buffer": {"kind": "uniform", "capacity": 20_000}}
    found = score(new_game, tmp_path / "data.csv", {"gamma": 0.95, **replayed, **fields})
    assert found > 2 * np.mean([len(episode) for episode in listed])
    if over_bc:
        assert found > over_bc * score(new_game, tmp_path / "data.csv", {"name": "bc"})
