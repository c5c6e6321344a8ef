"""Fitted Q evaluation on a chain whose values are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shared.config import PolicyConfig
from shared.policies.actor_critic import ActorCritic
from shared.spaces import Leaf, PolicySpaces, SpaceSpec
from trainer_node.fitted_q import Transitions, fit

GAMMA, LENGTH = 0.8, 5
PLACE = SpaceSpec((Leaf("", "discrete", (), "int64", (LENGTH + 1,), (0,)),), 0)
GO = SpaceSpec((Leaf("", "discrete", (), "int64", (2,), (0,)),), 0)
FORCE = SpaceSpec((Leaf("", "box", (1,), "float32", low=(-1.0,), high=(1.0,)),), 0)


def chain(action: SpaceSpec) -> Transitions:
    """Each place is left to the right (1, or a positive force), which costs 1, or one stays, which costs 2."""
    generator = np.random.default_rng(0)
    place = generator.integers(0, LENGTH, 2000)
    chosen = generator.integers(0, 2, 2000) if action is GO else generator.uniform(-1, 1, (2000, 1)).astype(np.float32)
    right = chosen == 1 if action is GO else chosen[:, 0] > 0
    after = place + right
    return Transitions(
        {"obs": torch.from_numpy(place)},
        {"action": torch.from_numpy(chosen)},
        torch.from_numpy(np.where(right, -1.0, -2.0).astype(np.float32)),
        torch.from_numpy(after == LENGTH),
        {"obs": torch.from_numpy(after)},
        torch.zeros(2000),
    )


def true_values(right: float) -> list[float]:
    """Of each place, where one goes to the right with this probability: solved from the end."""
    values = [0.0]
    for _ in range(LENGTH):
        here = (right * (-1 + GAMMA * values[0]) + (1 - right) * -2) / (1 - (1 - right) * GAMMA)
        values.insert(0, here)
    return values


@pytest.mark.parametrize("logit", [-1.0, 2.0])
def test_the_values_of_a_policy_other_than_the_one_that_acted(logit: float) -> None:
    policy = ActorCritic(PolicySpaces(PLACE, GO), PolicyConfig(hidden_sizes=()))
    with torch.no_grad():
        policy.head.weight.zero_()
        policy.head.bias.copy_(torch.tensor([0.0, logit]))
    before = torch.random.get_rng_state()
    fitted = fit(policy, chain(GO), GAMMA, 1500, seed=1)
    assert torch.equal(before, torch.random.get_rng_state())
    places = {"obs": torch.arange(LENGTH)}
    found = fitted.value(policy, places, torch.Generator().manual_seed(0))
    expected = true_values(1 / (1 + np.exp(-logit)))[:LENGTH]
    np.testing.assert_allclose(found.numpy(), expected, atol=0.35)
    stay, go = (fitted(places, {"action": torch.full((LENGTH,), n)}).detach().numpy() for n in (0, 1))
    assert (go > stay).all(), "going on is better everywhere"
    again = fit(policy, chain(GO), GAMMA, 1500, seed=1)
    assert torch.equal(again.value(policy, places, torch.Generator().manual_seed(0)), found)


def test_continuous_actions_are_averaged_over_samples() -> None:
    policy = ActorCritic(PolicySpaces(PLACE, FORCE), PolicyConfig(hidden_sizes=(), log_std_init=-2.0))
    with torch.no_grad():
        policy.head.weight.zero_()
        policy.head.bias.fill_(0.5)
    fitted = fit(policy, chain(FORCE), GAMMA, 1500, seed=1)
    found = fitted.value(policy, {"obs": torch.arange(LENGTH)}, torch.Generator().manual_seed(0))
    np.testing.assert_allclose(found.numpy(), true_values(1.0)[:LENGTH], atol=0.5)
