"""Explorations of discrete actions by their values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from pydantic import ValidationError

from stagecoach.rollout_worker.exploration.base import Exploration
from stagecoach.rollout_worker.exploration.discrete import EpsilonGreedy
from stagecoach.rollout_worker.exploration.noise import ParameterNoise
from stagecoach.shared.experience.counters import Counters
from tests.support.experience.exploration import MANY, alike, exploring, observations, policy_for, q_network
from tests.support.experience.policies import generator

TWO_PARTS = spaces.Tuple((spaces.Discrete(2), spaces.MultiBinary(2)))


@pytest.mark.parametrize(
    ("kind", "action", "fields"),
    [
        ("epsilon_greedy", spaces.Discrete(3), {}), ("epsilon_greedy", TWO_PARTS, {}),
        ("ucb", None, {"heads": 3}), ("bootstrapped", None, {"heads": 3}),
    ],
)  # fmt: skip
@torch.no_grad()
def test_epsilon_log_prob_matches_frequencies(
    kind: str, action: spaces.Space[object] | None, fields: dict[str, Any]
) -> None:
    policy = q_network(**fields) if action is None else policy_for(action)
    exploration = EpsilonGreedy(0.4) if kind == "epsilon_greedy" else exploring(kind=kind, epsilon=0.4)
    exploration.begin(0, 3)
    actions, params = exploration.act(policy, alike(MANY), generator())
    assert params is not None
    joint = np.concatenate([column.reshape(MANY, -1).numpy() for column in actions.values()], axis=1)
    _, which, counts = np.unique(joint, axis=0, return_inverse=True, return_counts=True)
    told = exploration.log_prob(policy, params, actions).exp().numpy()
    np.testing.assert_allclose(told, counts[which.reshape(-1)] / MANY, atol=0.015)
    assert counts.max() / MANY == pytest.approx(0.6 + 0.4 / len(counts), abs=0.015)


@pytest.mark.parametrize("temperature", [0.05, 0.3, 5.0])
@torch.no_grad()
def test_boltzmann_draws_by_softmax_of_values(temperature: float) -> None:
    policy = q_network()
    rows = alike(MANY)
    exploration = exploring(kind="boltzmann", temperature=temperature)
    actions, params = exploration.act(policy, rows, generator())
    values = policy.action_parameters(rows)[0].numpy().astype(np.float64)
    powers = [np.exp((value - values.max()) / temperature) for value in values]
    expected = np.array(powers) / sum(powers)
    assert params is not None
    found = np.bincount(actions["action"].numpy(), minlength=4) / MANY
    np.testing.assert_allclose(found, expected, atol=0.015)
    told = exploration.log_prob(policy, params, actions).exp().numpy()
    np.testing.assert_allclose(told, expected[actions["action"].numpy()], rtol=1e-4)


def test_boltzmann_temperature_follows_schedule() -> None:
    falling = {"kind": "exponential", "start": 10.0, "end": 1e-4, "over": "100 env_steps"}
    policy, rows = q_network(), alike(400)
    late = exploring(Counters(env_steps=100), kind="boltzmann", temperature=falling).act(policy, rows, generator())[0]
    early = exploring(kind="boltzmann", temperature=falling).act(policy, rows, generator())[0]
    assert len(set(late["action"].tolist())) == 1 and len(set(early["action"].tolist())) == 4
    with pytest.raises(ValidationError, match="temperature gets to 0"):
        exploring(kind="boltzmann", temperature={"kind": "linear", "start": 1, "end": 0, "over": "5 updates"})


@torch.no_grad()
def test_noisy_network_log_prob_is_unknown() -> None:
    policy, sampling = q_network(noisy=True), exploring(kind="sampling")
    actions, params = sampling.act(policy, observations(9), generator())
    assert sampling.log_prob(policy, params, actions).isnan().all()


@pytest.mark.parametrize("fields", [{}, {"head": "qr", "quantiles": 3, "dueling": True}, {"prior_scale": 2.0}], ids=str)
@torch.no_grad()
def test_ucb_takes_largest_mean_plus_deviation(fields: dict[str, Any]) -> None:
    policy = q_network(heads=5, **fields)
    sight = observations(200)
    heads = policy.head_values(sight).numpy().astype(np.float64)
    coefficient = {"kind": "linear", "start": 4.0, "end": 0.0, "over": "100 env_steps"}
    taken = {}
    for steps, times in ((0, 4.0), (75, 1.0), (100, 0.0)):
        exploration = exploring(Counters(env_steps=steps), kind="ucb", coefficient=coefficient)
        actions, params = exploration.act(policy, sight, generator())
        for row in range(200):
            bounds = []
            for action in range(4):
                values = [heads[head, row, action] for head in range(5)]
                mean = sum(values) / 5
                bounds.append(mean + times * (sum((value - mean) ** 2 for value in values) / 5) ** 0.5)
            assert int(actions["action"][row]) == int(np.argmax(bounds))
        assert params is not None and (exploration.log_prob(policy, params, actions) == 0).all()
        taken[steps] = actions["action"]
    assert torch.equal(taken[100], policy.action_parameters(sight).argmax(dim=1))
    assert not torch.equal(taken[0], taken[100])


@torch.no_grad()
def test_bootstrapped_head_follows_episode_seed() -> None:
    policy, sight = q_network(heads=6, prior_scale=3.0), alike(8)
    values = policy.head_values(sight)[:, 0]

    def told(seeds: list[int]) -> tuple[Exploration, list[int]]:
        """Returns an exploration and the head of each of 8 slots: two agents in each of 4 environments."""
        exploration = exploring(kind="bootstrapped")
        for environment, seed in enumerate(seeds):
            exploration.begin(environment, seed)
        _, params = exploration.act(policy, sight, generator())
        assert params is not None
        return exploration, [int((values == row).all(dim=1).nonzero()) for row in params]

    exploration, heads = told([7, 8, 9, 10])
    assert heads[:4] == heads[4:], "agents of one environment explore together"
    assert told([7, 8, 9, 10])[1] == heads
    assert told([7, 8, 1234, 10])[1][:2] == heads[:2]
    actions, _ = exploration.act(policy, sight, generator(9))
    assert actions["action"].tolist() == [int(values[head].argmax()) for head in heads]
    drawn = np.bincount([head for first in range(0, 4000, 4) for head in told(list(range(first, first + 4)))[1][:4]])
    np.testing.assert_allclose(drawn / 4000, 1 / 6, atol=0.03)


@torch.no_grad()
def test_parameter_noise_disturbs_q_network() -> None:
    policy, sight = q_network(), observations(300)
    actions, _ = ParameterNoise(1.0).act(policy, sight, generator())
    best = policy.action_parameters(sight).argmax(dim=1)
    assert actions["action"].shape == best.shape and not torch.equal(actions["action"], best)
