"""The actor-critic policy: its outputs, its start, and what of it is shared."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from gymnasium import spaces
from torch.distributions import Normal

from rollout_worker.making import describe_space
from rollout_worker.vector import pick
from shared.algorithm_configs.ppo import PPOConfig
from shared.config import PolicyConfig
from shared.policies.actor_critic import ActorCritic
from shared.policies.codec import state_arrays
from shared.policies.registry import build_policies
from shared.spaces import PolicySpaces
from tests.environments_for_tests import ACTIONS, OBSERVATIONS
from tests.shared.test_encoders import batch_of


def policy_for(observation: str, action: str, **config: Any) -> ActorCritic:
    spaces_ = PolicySpaces(describe_space(OBSERVATIONS[observation]), describe_space(ACTIONS[action]))
    configured = PolicyConfig.model_validate({"cnn": "small", **config})
    return cast(
        ActorCritic, build_policies({"default": spaces_}, {"default": configured}, PPOConfig(), seed=1)["default"]
    )


@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.parametrize("action", ["discrete", "dict"])
def test_it_acts_and_judges_in_every_observation_space(observation: str, action: str) -> None:
    policy = policy_for(observation, action, normalise_observations=True)
    rows = batch_of(OBSERVATIONS[observation], 6)
    assert policy.normaliser is not None
    policy.normaliser.update(rows)
    params, value = policy.action_parameters_and_value(rows)
    assert params.shape == (6, policy.distribution.parameters) and value.shape == (6,)
    assert torch.equal(params, policy.action_parameters(rows)) and torch.equal(value, policy.value(rows))
    assert bool(torch.isfinite(params).all()) and bool(torch.isfinite(value).all())


@pytest.mark.parametrize("action", ACTIONS)
def test_its_parameters_fit_its_distribution_in_every_action_space(action: str) -> None:
    policy = policy_for("box", action)
    rows = batch_of(OBSERVATIONS["box"], 3)
    params = policy.action_parameters(rows)
    chosen = policy.distribution.sample(params.detach(), torch.Generator().manual_seed(0))
    assert policy.distribution.log_prob(params, chosen).shape == (3,)
    nested = policy.spaces.action.to_environment({name: value.numpy() for name, value in chosen.items()})
    assert all(ACTIONS[action].contains(pick(nested, row)) for row in range(3))


def test_the_deviation_of_each_gaussian_is_behind_its_own_mean() -> None:
    space = spaces.Tuple((spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(3), spaces.Box(-1.0, 1.0, (1,))))
    spec = PolicySpaces(describe_space(OBSERVATIONS["box"]), describe_space(space))
    policy = build_policies({"p": spec}, {"p": PolicyConfig(log_std_init=-1.5)}, PPOConfig(), seed=0)["p"]
    assert isinstance(policy, ActorCritic)
    with torch.no_grad():
        policy.log_std.copy_(torch.tensor([-1.0, -2.0, -3.0]))
    rows = batch_of(OBSERVATIONS["box"], 4)
    params = policy.action_parameters(rows)
    assert params[0, 2:4].tolist() == [-1.0, -2.0] and params[0, 8].item() == -3.0
    mode = policy.distribution.mode(params)
    actions = {"action.0": mode["action.0"] + 0.1, "action.1": mode["action.1"], "action.2": mode["action.2"]}
    gaussians = Normal(torch.zeros(3), torch.tensor([-1.0, -2.0, -3.0]).exp())
    expected = gaussians.log_prob(torch.tensor([0.1, 0.1, 0.0])).sum()
    expected = expected + torch.log_softmax(params[:, 4:7], 1).max(1).values
    torch.testing.assert_close(policy.distribution.log_prob(params, actions), expected, rtol=1e-4, atol=1e-4)


def test_an_untrained_policy_is_nearly_uniform_with_the_configured_deviation() -> None:
    rows = batch_of(OBSERVATIONS["box"], 100)
    params = policy_for("box", "discrete").action_parameters(rows)
    assert torch.softmax(params, 1).sub(0.25).abs().max().item() < 0.02
    gaussian = policy_for("box", "box", log_std_init=-0.7)
    params = gaussian.action_parameters(rows)
    assert params[:, :2].abs().max().item() < 0.1
    assert params[:, 2:].unique().tolist() == pytest.approx([-0.7])


def test_it_follows_from_the_seed_alone_and_leaves_the_global_state() -> None:
    spec = PolicySpaces(describe_space(OBSERVATIONS["box"]), describe_space(ACTIONS["discrete"]))
    made = []
    for seed, noise in ((4, 0), (4, 1), (5, 0)):
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        made.append(state_arrays(build_policies({"p": spec}, {"p": PolicyConfig()}, PPOConfig(), seed)["p"]))
        assert torch.equal(before, torch.get_rng_state())
    assert all((made[0][name] == made[1][name]).all() for name in made[0])
    assert any((made[0][name] != made[2][name]).any() for name in made[0])


def test_policies_of_one_run_start_apart() -> None:
    spec = PolicySpaces(describe_space(OBSERVATIONS["box"]), describe_space(ACTIONS["discrete"]))
    policies = build_policies({"a": spec, "b": spec}, {"a": PolicyConfig(), "b": PolicyConfig()}, PPOConfig(), seed=0)
    a, b = (cast(ActorCritic, policy).head.weight for policy in policies.values())
    assert not torch.equal(a, b)


def test_a_shared_encoder_is_one_encoder() -> None:
    apart, shared = policy_for("dict", "discrete"), policy_for("dict", "discrete", share_encoder=True)
    assert shared.critic is shared.actor and apart.critic is not apart.actor
    count = [sum(p.numel() for p in policy.parameters()) for policy in (apart, shared)]
    assert count[0] - count[1] == sum(p.numel() for p in apart.critic.parameters())
    rows = batch_of(OBSERVATIONS["dict"], 2)
    shared.value(rows).sum().backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in shared.actor.parameters())


def test_layers_start_orthogonal_with_the_reference_gains() -> None:
    policy = policy_for("box", "discrete", hidden_sizes=(8, 8))
    square = policy.actor.mlp[2]
    assert isinstance(square, torch.nn.Linear)
    torch.testing.assert_close(square.weight @ square.weight.T, 2 * torch.eye(8), rtol=0, atol=1e-5)
    torch.testing.assert_close(policy.head.weight @ policy.head.weight.T, 1e-4 * torch.eye(4), rtol=0, atol=1e-8)
    assert policy.value_head.weight.norm().item() == pytest.approx(1.0, rel=1e-5)
    assert all(not layer.bias.any() for layer in (square, policy.head, policy.value_head))
    assert math.isclose(policy.log_std.numel(), 0)
