"""Exploring with choices: by ε, by temperature, and by what the heads of an ensemble disagree on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from pydantic import TypeAdapter, ValidationError

from rollout_worker.action_noise import ParameterNoise
from rollout_worker.choosing import EpsilonGreedy
from rollout_worker.exploration import Exploration
from rollout_worker.exploring import make_exploration
from rollout_worker.making import describe_space
from shared.algorithm_configs.dqn import DQNConfig
from shared.config import PolicyConfig
from shared.exploration_config import ExplorationField
from shared.policies.q_network import QNetwork
from shared.policies.registry import build_policies
from shared.spaces import PolicySpaces
from shared.steps import Counters
from tests.rollout_worker.test_exploration import generator, observations, policy_for

ROWS = 20_000


def exploring(counters: Counters | None = None, **section: Any) -> Exploration:
    return make_exploration(TypeAdapter(ExplorationField).validate_python(section), counters or Counters())


def q_network(**fields: Any) -> QNetwork:
    sight = spaces.Box(-1.0, 1.0, (3,), np.float32)
    described = PolicySpaces(describe_space(sight), describe_space(spaces.Discrete(4)))
    config = {"p": PolicyConfig(hidden_sizes=(8,))}
    made = build_policies({"p": described}, config, DQNConfig.model_validate(fields), seed=5)["p"]
    assert isinstance(made, QNetwork)
    return made


@pytest.mark.parametrize("action", [spaces.Discrete(3), spaces.Tuple((spaces.Discrete(2), spaces.MultiBinary(2)))])
@torch.no_grad()
def test_epsilon_greedy_tells_the_probability_of_what_it_does(action: spaces.Space[object]) -> None:
    policy = policy_for(action)
    rows = {"obs": observations(1)["obs"].expand(40_000, -1)}
    exploration = EpsilonGreedy(0.4)
    actions, params = exploration.act(policy, rows, generator())
    assert params is not None
    told = exploration.log_prob(policy, params, actions)
    assert told.shape == (40_000,)
    joint = np.concatenate([column.reshape(40_000, -1).numpy() for column in actions.values()], axis=1)
    _, which, counts = np.unique(joint, axis=0, return_inverse=True, return_counts=True)
    np.testing.assert_allclose(told.exp().numpy(), counts[which.reshape(-1)] / 40_000, atol=0.012)


@pytest.mark.parametrize("temperature", [0.05, 0.3, 5.0])
@torch.no_grad()
def test_boltzmann_draws_by_the_softmax_of_values_and_tells_its_probability(temperature: float) -> None:
    policy = q_network()
    rows = {"obs": observations(1)["obs"].expand(ROWS, -1)}
    exploration = exploring(kind="boltzmann", temperature=temperature)
    actions, params = exploration.act(policy, rows, generator())
    values = policy.action_parameters(rows)[0].numpy().astype(np.float64)
    powers = [np.exp((value - values.max()) / temperature) for value in values]
    expected = np.array(powers) / sum(powers)
    assert params is not None
    found = np.bincount(actions["action"].numpy(), minlength=4) / ROWS
    np.testing.assert_allclose(found, expected, atol=0.015)
    told = exploration.log_prob(policy, params, actions).exp().numpy()
    np.testing.assert_allclose(told, expected[actions["action"].numpy()], rtol=1e-4)


def test_a_temperature_falls_with_the_counters_and_may_not_come_to_nothing() -> None:
    falling = {"kind": "exponential", "start": 10.0, "end": 1e-4, "over": "100 env_steps"}
    policy, rows = q_network(), {"obs": observations(1)["obs"].expand(400, -1)}
    late = exploring(Counters(env_steps=100), kind="boltzmann", temperature=falling).act(policy, rows, generator())[0]
    early = exploring(kind="boltzmann", temperature=falling).act(policy, rows, generator())[0]
    assert len(set(late["action"].tolist())) == 1 and len(set(early["action"].tolist())) == 4
    with pytest.raises(ValidationError, match="temperature gets to 0"):
        exploring(kind="boltzmann", temperature={"kind": "linear", "start": 1, "end": 0, "over": "5 updates"})


@torch.no_grad()
def test_of_noise_on_the_weights_no_probability_is_known() -> None:
    policy, sampling = q_network(noisy=True), exploring(kind="sampling")
    actions, params = sampling.act(policy, observations(9), generator())
    assert sampling.log_prob(policy, params, actions).isnan().all()


@pytest.mark.parametrize("fields", [{}, {"head": "qr", "quantiles": 3, "dueling": True}, {"prior_scale": 2.0}], ids=str)
@torch.no_grad()
def test_ucb_takes_the_largest_mean_and_deviations_over_the_heads(fields: dict[str, Any]) -> None:
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
def test_an_episode_is_acted_by_one_head_that_follows_from_its_seed() -> None:
    policy, sight = q_network(heads=6, prior_scale=3.0), {"obs": observations(1)["obs"].expand(8, -1)}
    values = policy.head_values(sight)[:, 0]

    def told(seeds: list[int]) -> tuple[Exploration, list[int]]:
        """An exploration of 8 slots: two agents in each of 4 environments; and the head of each slot."""
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


@pytest.mark.parametrize("kind", ["ucb", "bootstrapped"])
@torch.no_grad()
def test_an_ensemble_may_also_act_at_random_now_and_then(kind: str) -> None:
    policy, sight = q_network(heads=3), {"obs": observations(1)["obs"].expand(ROWS, -1)}
    exploration = exploring(kind=kind, epsilon=0.4)
    exploration.begin(0, 3)
    actions, params = exploration.act(policy, sight, generator())
    assert params is not None
    shares = np.bincount(actions["action"].numpy(), minlength=4) / ROWS
    told = exploration.log_prob(policy, params, actions).exp().numpy()
    np.testing.assert_allclose(told, shares[actions["action"].numpy()], atol=0.015)
    assert shares.max() == pytest.approx(0.7, abs=0.015)


@torch.no_grad()
def test_weights_of_a_q_network_may_be_disturbed() -> None:
    policy, sight = q_network(), observations(300)
    actions, _ = ParameterNoise(1.0).act(policy, sight, generator())
    best = policy.action_parameters(sight).argmax(dim=1)
    assert actions["action"].shape == best.shape and not torch.equal(actions["action"], best)
