"""The actor-critic policies: outputs, start, what is shared; whole sequences of a recurrent one are single steps."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch.distributions import Normal

from stagecoach.rollout_worker.environments.description import describe_space
from stagecoach.rollout_worker.environments.vector_env import pick
from stagecoach.shared.base.errors import ConfigError, UserError
from stagecoach.shared.config.algorithms.on_policy import PPOConfig
from stagecoach.shared.config.sections import PolicyConfig
from stagecoach.shared.deployment.deployed_policy import DeployedPolicy
from stagecoach.shared.experience.spaces import PolicySpaces
from stagecoach.shared.policies.actor_critic import ActorCritic, RecurrentActorCritic, Stateful, with_states
from stagecoach.shared.policies.registry import build_policies
from stagecoach.shared.policies.serialization import state_arrays
from tests.support.environments.small import ACTIONS, OBSERVATIONS
from tests.support.experience.policies import SIGHT, batch_of, built_policy, generator


def policy_for(observation: str, action: str, **config: Any) -> ActorCritic:
    return cast(ActorCritic, built_policy(OBSERVATIONS[observation], ACTIONS[action], cnn="small", **config))


@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.parametrize("action", ["discrete", "dict"])
def test_actor_critic_supports_every_observation_space(observation: str, action: str) -> None:
    policy = policy_for(observation, action, normalize_observations=True)
    rows = batch_of(OBSERVATIONS[observation], 6)
    assert policy.normalizer is not None
    policy.normalizer.update(rows)
    params, value = policy.action_parameters_and_value(rows)
    assert params.shape == (6, policy.distribution.parameters) and value.shape == (6,)
    assert torch.equal(params, policy.action_parameters(rows)) and torch.equal(value, policy.value(rows))
    assert bool(torch.isfinite(params).all()) and bool(torch.isfinite(value).all())
    core = recurrent("lstm", OBSERVATIONS[observation], ACTIONS[action])
    step, state = core.step(rows, core.initial_state(6))
    assert step.shape == params.shape and state.shape == (6, 14)
    long = {name: tensor.unflatten(0, (2, 3)) for name, tensor in rows.items()}
    sequence = core.sequence(long, core.initial_state(3), torch.zeros(2, 3, dtype=torch.bool))
    assert [tuple(part.shape) for part in sequence] == [(2, 3, params.shape[1]), (2, 3), (2, 3, 14)]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("overridden", ["action_parameters", "value"])
def test_loss_sees_overridden_output(overridden: str, shared: bool) -> None:
    """A custom network that overrides only the acting methods learns through them, not through the built-in one."""
    policy, rows = policy_for("box", "discrete", share_encoder=shared), batch_of(OBSERVATIONS["box"], 3)
    built_in = policy.action_parameters_and_value(rows)
    policy.__class__ = type("Own", (ActorCritic,), {overridden: lambda self, rows: torch.full((3,), 7.0)})
    learned = policy.action_parameters_and_value(rows)
    own = overridden == "value"
    assert learned[own].tolist() == [7.0] * 3 and torch.equal(learned[not own], built_in[not own])


@pytest.mark.parametrize("action", ACTIONS)
def test_actor_critic_supports_every_action_space(action: str) -> None:
    policy = policy_for("box", action)
    rows = batch_of(OBSERVATIONS["box"], 3)
    params = policy.action_parameters(rows)
    chosen = policy.distribution.sample(params.detach(), torch.Generator().manual_seed(0))
    assert policy.distribution.log_prob(params, chosen).shape == (3,)
    nested = policy.spaces.action.to_environment({name: value.numpy() for name, value in chosen.items()})
    assert all(ACTIONS[action].contains(pick(nested, row)) for row in range(3))


def test_gaussian_deviations_follow_their_means() -> None:
    space = spaces.Tuple((spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(3), spaces.Box(-1.0, 1.0, (1,))))
    policy = built_policy(OBSERVATIONS["box"], space)
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


def test_untrained_policy_is_nearly_uniform() -> None:
    rows = batch_of(OBSERVATIONS["box"], 100)
    params = policy_for("box", "discrete").action_parameters(rows)
    assert torch.softmax(params, 1).sub(0.25).abs().max().item() < 0.02
    gaussian = policy_for("box", "box", log_std_init=-0.7)
    params = gaussian.action_parameters(rows)
    assert params[:, :2].abs().max().item() < 0.1
    assert params[:, 2:].unique().tolist() == pytest.approx([-0.7])


def test_initial_weights_follow_from_seed_alone() -> None:
    made = []
    for seed, noise in ((4, 0), (4, 1), (5, 0)):
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        made.append(state_arrays(built_policy(SIGHT, spaces.Discrete(4), seed=seed)))
        assert torch.equal(before, torch.get_rng_state())
    assert all((made[0][name] == made[1][name]).all() for name in made[0])
    assert any((made[0][name] != made[2][name]).any() for name in made[0])
    spec = PolicySpaces(describe_space(SIGHT), describe_space(spaces.Discrete(4)))
    policies = build_policies({"a": spec, "b": spec}, {"a": PolicyConfig(), "b": PolicyConfig()}, PPOConfig(), seed=0)
    a, b = (cast(ActorCritic, policy).head.weight for policy in policies.values())
    assert not torch.equal(a, b), "policies of one run start apart"


def test_shared_encoder_is_one_encoder() -> None:
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


STEPS, SLOTS = 9, 5
ARMS = spaces.Box(-1.0, 1.0, (2,))
RECURRENT: dict[str, Any] = {"core_size": 7, "share_encoder": True, "hidden_sizes": (8,), "cnn": "small"}
CORES = pytest.mark.parametrize("core", ["lstm", "gru"])


def recurrent(
    core: str, observation: spaces.Space[Any] = SIGHT, action: spaces.Space[Any] = ARMS, **config: Any
) -> RecurrentActorCritic:
    """With larger head weights than at the start, so that outputs tell states apart."""
    policy = cast(RecurrentActorCritic, built_policy(observation, action, **RECURRENT, core=core, **config))
    with torch.no_grad():
        policy.head.weight.mul_(100)
    return policy


def observed(seed: int = 0) -> Tensor:
    return torch.randn(STEPS, SLOTS, 3, generator=generator(seed))


def ends(*places: tuple[int, int]) -> Tensor:
    over = torch.zeros(STEPS, SLOTS, dtype=torch.bool)
    for step, slot in places:
        over[step, slot] = True
    return over


def one_by_one(
    policy: RecurrentActorCritic, obs: Tensor, state: Tensor, over: Tensor
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """As a worker acts."""
    acting = Stateful(policy, state)
    params, values, states = [], [], []
    for step in range(len(obs)):
        values.append(policy.value({"obs": obs[step]}, acting.state))
        params.append(acting.action_parameters({"obs": obs[step]}))
        states.append(acting.state)
        acting.forget(over[step])
    return params, values, states


@CORES
@pytest.mark.parametrize("places", [(), ((0, 0), (3, 1), (4, 1), (8, 2))], ids=["no end", "ends"])
def test_sequence_equals_step_by_step_acting(core: str, places: tuple[tuple[int, int], ...]) -> None:
    policy = recurrent(core, normalize_observations=True)
    assert policy.normalizer is not None
    policy.normalizer.update({"obs": observed(5).flatten(0, 1)})
    state = torch.randn(SLOTS, policy.state_size, generator=torch.Generator().manual_seed(3)).tanh()
    obs, over = observed(), ends(*places)
    with torch.no_grad():
        found = policy.sequence({"obs": obs}, state, over)
        expected = one_by_one(policy, obs, state, over)
    for whole, steps in zip(found, expected, strict=True):
        torch.testing.assert_close(whole, torch.stack(steps), rtol=1e-5, atol=1e-6)
    assert found[0][..., :2].std(dim=0).min() > 0.01, "it acts on what it sees"


@CORES
def test_gradients_flow_back_to_episode_start(core: str) -> None:
    policy = recurrent(core)
    obs = observed().requires_grad_()
    state = policy.initial_state(SLOTS).requires_grad_()
    params, _, _ = policy.sequence({"obs": obs}, state, ends((3, 0)))
    params[6].sum().backward()
    assert obs.grad is not None and state.grad is not None
    reached = obs.grad.abs().sum(dim=-1) > 0
    assert reached[:, 0].tolist() == [False] * 4 + [True] * 3 + [False] * 2, "not across the end"
    assert reached[:, 1].tolist() == [True] * 7 + [False] * 2
    assert (state.grad.abs().sum(dim=1) > 0).tolist() == [False, True, True, True, True]


def test_policies_without_a_core_remember_nothing() -> None:
    policy = built_policy(SIGHT, ARMS)
    assert policy.kind == "actor_critic" and policy.state_size == 0 and policy.initial_state(4).shape == (4, 0)
    assert with_states({"p": policy}, {"p": 4}) == {}
    rows = {"obs": observed()[0]}
    params, state = policy.step(rows, policy.initial_state(SLOTS))
    assert torch.equal(params, policy.action_parameters(rows)) and state.shape == (SLOTS, 0)


def test_core_needs_algorithm_for_sequences() -> None:
    with pytest.raises(NotImplementedError, match="recurrent_actor_critic has no parameters for observations alone"):
        recurrent("gru").action_parameters({"obs": observed()[0]})
    with pytest.raises(ConfigError, match=r"policies\.p\.core=lstm: algorithm \w+ learns single steps .* core=none"):
        built_policy(SIGHT, ARMS, "iql", **RECURRENT, core="lstm")


@CORES
def test_deployed_policy_remembers_until_reset(core: str) -> None:
    policy = recurrent(core)
    acting, alone = DeployedPolicy(policy, 1), DeployedPolicy(policy, 1)
    obs, over = observed(), ends((3, 1), (3, 4))
    with torch.no_grad():
        params = policy.sequence({"obs": obs}, policy.initial_state(SLOTS), over)[0]
    means = params[..., :2].clamp(-1, 1).numpy()
    for _ in range(2):
        for step in range(STEPS):
            found = acting.act_batch(obs[step].numpy())
            np.testing.assert_allclose(found, means[step], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(alone.act(obs[step, 0].numpy()), means[step, 0], rtol=1e-4, atol=1e-5)
            acting.reset(over[step].numpy())
        again = alone.act(obs[0, 0].numpy())
        assert not np.allclose(again, means[0, 0], atol=1e-4), "it remembers the episode so far"
        acting.reset()
        alone.reset()


def test_batch_of_another_size_is_rejected_until_reset() -> None:
    acting = DeployedPolicy(recurrent("lstm"), 1)
    acting.act_batch(observed()[0].numpy())
    with pytest.raises(UserError, match=r"1 observations, but the policy holds state for 5 episodes; call reset\(\)"):
        acting.act(observed()[1, 0].numpy())
    with pytest.raises(UserError, match=r"`over` has the shape \(2,\), the batch so far has 5 rows"):
        acting.reset([True, False])
    acting.reset()
    acting.act(observed()[1, 0].numpy())
