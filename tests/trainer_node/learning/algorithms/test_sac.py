"""SAC and TD3: what one gradient step moves, and the temperature; their losses are compared in against_others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from stagecoach.rollout_worker.environments.description import describe_space
from stagecoach.shared.base.errors import UnsupportedSpace
from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.experience.spaces import PolicySpaces
from stagecoach.trainer_node.learning.building_blocks.optimization import state_of
from tests.support.learning.algorithms import BOXES, CHOICE, HIGH, LOW, make, move_apart
from tests.support.learning.experience import minibatch


def test_critic_loss_spares_targets_and_policy() -> None:
    sac, batch = make("sac"), minibatch(BOXES)
    sac.critic_loss(batch, torch.zeros(len(batch), 2))[0].backward()
    assert all(tensor.grad is None for network in (sac.policy, sac.targets) for tensor in network.parameters())
    assert all(tensor.grad is not None for tensor in sac.critics.parameters())


def test_temperature_moves_entropy_to_target() -> None:
    """A bandit whose reward is −10 · a²: the best policy is as wide as the temperature makes it."""
    sac = make("sac", policy={"hidden_sizes": (64, 64), "activation": "relu"}, learning_rate=1e-2, target_entropy=-1.0)
    drawing, entropies = torch.Generator().manual_seed(0), []
    for step in range(400):
        batch = minibatch(BOXES, rows=64, seed=step)
        unit = sac.policy.bounds.flat(batch.actions)
        bandit = replace(batch, reward=-10 * unit.square().sum(dim=1), discount=torch.zeros(64), weight=torch.ones(64))
        entropies.append(float(sac.learn(bandit, Counters(), drawing).metrics["train/entropy"]))
    assert entropies[0] > 0.0
    assert np.mean(entropies[-100:]) == pytest.approx(-1.0, abs=0.15)


def test_fixed_temperature_stays() -> None:
    sac = make("sac", initial_temperature=0.2, learn_temperature=False)
    sac.learn(minibatch(BOXES), Counters(), torch.Generator().manual_seed(1))
    assert float(sac.log_temperature.detach().exp()) == pytest.approx(0.2)


def test_default_target_entropy_depends_on_kind_of_action() -> None:
    assert make("sac", BOXES).target_entropy == -2.0
    greedy = np.array([0.925, 0.025, 0.025, 0.025])
    assert make("sac", CHOICE).target_entropy == pytest.approx(-(greedy * np.log(greedy)).sum())


@pytest.mark.parametrize(
    "action", [spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(2), spaces.Tuple((spaces.Discrete(2),) * 2)], ids=str
)
@pytest.mark.parametrize("name", ["sac", "cql"])
def test_several_choices_are_refused(name: str, action: spaces.Space[Any]) -> None:
    described = PolicySpaces(describe_space(spaces.Box(-1.0, 1.0, (3,))), describe_space(action))
    with pytest.raises(UnsupportedSpace, match=f"{name} learns boxes or one discrete choice, .* or iql for recorded"):
        make(name, described)


def test_noise_on_choices_is_refused() -> None:
    with pytest.raises(UnsupportedSpace, match="exploration=gaussian is for continuous actions; use sampling"):
        make("sac", CHOICE, exploration={"kind": "gaussian"})


@pytest.mark.parametrize("value_weight", [0.0, 2.5])
def test_td3_bc_policy_loss_normalizes_values_and_adds_data(value_weight: float) -> None:
    """Eq. 5 of the paper, one transition after another; the weight of the values has no gradient."""
    algorithm, batch = make("td3_bc", BOXES, value_weight=value_weight), minibatch(BOXES, 30)
    move_apart(algorithm.policy, algorithm.critics)
    loss = algorithm.actor_loss(batch)
    gradient = torch.autograd.grad(loss, algorithm.policy.head.bias)[0]
    with torch.no_grad():
        action = torch.tanh(algorithm.policy.action_parameters(batch.observations))
        value = algorithm.critics(batch.observations, None, action)[0].squeeze(1).double().numpy()
        done = (batch.actions["action"].numpy() - (LOW + HIGH) / 2) / ((HIGH - LOW) / 2)
    share = value_weight / np.abs(value).mean()
    each = [
        weight * (((mine - theirs) ** 2).mean() - share * q)
        for weight, mine, theirs, q in zip(batch.weight.tolist(), action.numpy(), done, value, strict=True)
    ]
    assert loss.item() == pytest.approx(np.mean(each), rel=1e-4)
    algorithm._config = algorithm._config.model_copy(update={"value_weight": 2 * value_weight})
    doubled = torch.autograd.grad(algorithm.actor_loss(batch), algorithm.policy.head.bias)[0]
    assert torch.equal(doubled, gradient) == (value_weight == 0)


@pytest.mark.parametrize(
    ("name", "described", "delay"), [("sac", BOXES, 1), ("sac", CHOICE, 1), ("cql", BOXES, 1), ("td3", BOXES, 3)]
)
def test_policy_and_targets_update_less_often_than_critics(name: str, described: PolicySpaces, delay: int) -> None:
    fields: dict[str, Any] = {"policy_delay": delay} if name == "td3" else {}
    algorithm = make(name, described, tau=0.25, **fields)
    drawing, networks = torch.Generator().manual_seed(1), algorithm.parts | {"policy/": algorithm.policy}
    for algorithm.done in range(2 * delay):
        before = state_of(networks)
        metrics = algorithm.learn(minibatch(described, seed=algorithm.done), Counters(), drawing).metrics
        after, moves = state_of(networks), algorithm.done % delay == delay - 1
        assert ("train/actor_loss" in metrics) == moves
        assert [key for key in after if key.startswith("critics/") and (after[key] == before[key]).all()] == []
        for key in before:
            if key.startswith(("policy/", "log_temperature")):
                assert (after[key] != before[key]).any() == moves, key
            elif key.startswith("target"):
                online = after[key.replace("targets/", "critics/").replace("target_policy/", "policy/")]
                expected = 0.75 * before[key] + 0.25 * online if moves else before[key]
                np.testing.assert_allclose(after[key], expected, atol=1e-6)
