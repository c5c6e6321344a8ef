"""The recurrent policy: whole sequences are what acting step by step is, and nothing crosses where it must not."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from rollout_worker.making import describe_space
from shared.algorithm_configs.ppo import PPOConfig
from shared.algorithm_configs.section import AlgorithmConfig
from shared.config import PolicyConfig
from shared.errors import ConfigError, UserError
from shared.policies.codec import decode_policy, encode_policy, state_arrays
from shared.policies.deployed import DeployedPolicy
from shared.policies.recurrent import RecurrentActorCritic
from shared.policies.registry import build_policies
from shared.policies.stateful import Stateful, with_states
from shared.spaces import PolicySpaces
from tests.conftest import minimal_config
from tests.environments_for_tests import OBSERVATIONS
from tests.shared.test_encoders import batch_of

STEPS, SLOTS = 9, 5
CORES = pytest.mark.parametrize("core", ["lstm", "gru"])
BOX = PolicySpaces(describe_space(spaces.Box(-5.0, 5.0, (3,))), describe_space(spaces.Box(-1.0, 1.0, (2,))))


def configured(core: str, **config: Any) -> PolicyConfig:
    return PolicyConfig.model_validate(
        {"core": core, "core_size": 7, "share_encoder": True, "hidden_sizes": (8,), "cnn": "small", **config}
    )


def recurrent(core: str, described: PolicySpaces = BOX, **config: Any) -> RecurrentActorCritic:
    """With larger head weights than at the start, so that outputs tell states apart."""
    built = build_policies({"p": described}, {"p": configured(core, **config)}, PPOConfig(), seed=1)["p"]
    policy = cast(RecurrentActorCritic, built)
    with torch.no_grad():
        policy.head.weight.mul_(100)
    return policy


def observed(seed: int = 0) -> Tensor:
    return torch.randn(STEPS, SLOTS, 3, generator=torch.Generator().manual_seed(seed))


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
def test_a_sequence_is_what_acting_step_by_step_is(core: str, places: tuple[tuple[int, int], ...]) -> None:
    policy = recurrent(core, normalise_observations=True)
    assert policy.normaliser is not None
    policy.normaliser.update({"obs": observed(5).flatten(0, 1)})
    state = torch.randn(SLOTS, policy.state_size, generator=torch.Generator().manual_seed(3)).tanh()
    obs, over = observed(), ends(*places)
    with torch.no_grad():
        found = policy.sequence({"obs": obs}, state, over)
        expected = one_by_one(policy, obs, state, over)
    for whole, steps in zip(found, expected, strict=True):
        torch.testing.assert_close(whole, torch.stack(steps), rtol=1e-5, atol=1e-6)
    assert found[0][..., :2].std(dim=0).min() > 0.01, "it acts on what it sees"


@CORES
def test_what_was_before_an_end_makes_no_difference_after_it_and_else_it_does(core: str) -> None:
    policy = recurrent(core)
    one, other = observed(1), observed(1)
    other[:4] = observed(2)[:4]
    state = policy.initial_state(SLOTS)
    over = ends((3, 0), (3, 2))
    with torch.no_grad():
        params = [policy.sequence({"obs": obs}, state, over)[0] for obs in (one, other)]
    same = (params[0][4:] == params[1][4:]).all(dim=-1).all(dim=0)
    assert same.tolist() == [True, False, True, False, False]


@CORES
def test_two_fragments_are_one_long_one(core: str) -> None:
    policy = recurrent(core)
    obs, over = observed(), ends((2, 1), (3, 3), (5, 0))
    with torch.no_grad():
        params, values, states = policy.sequence({"obs": obs}, policy.initial_state(SLOTS), over)
        first = policy.sequence({"obs": obs[:4]}, policy.initial_state(SLOTS), over[:4])
        state = first[2][-1].masked_fill(over[3].unsqueeze(1), 0.0)
        second = policy.sequence({"obs": obs[4:]}, state, over[4:])
    for whole, *parts in zip((params, values, states), first, second, strict=True):
        torch.testing.assert_close(whole, torch.cat(parts), rtol=1e-5, atol=1e-6)


@CORES
def test_gradients_flow_back_in_time_to_the_episodes_beginning(core: str) -> None:
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


@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_it_acts_and_judges_in_every_observation_space(observation: str) -> None:
    described = PolicySpaces(describe_space(OBSERVATIONS[observation]), describe_space(spaces.Discrete(3)))
    policy = recurrent("lstm", described)
    rows = batch_of(OBSERVATIONS[observation], 6)
    params, state = policy.step(rows, policy.initial_state(6))
    assert params.shape == (6, policy.distribution.parameters) and state.shape == (6, 14)
    long = {name: tensor.unflatten(0, (2, 3)) for name, tensor in rows.items()}
    sequence = policy.sequence(long, policy.initial_state(3), torch.zeros(2, 3, dtype=torch.bool))
    assert [tuple(part.shape) for part in sequence] == [(2, 3, 3), (2, 3), (2, 3, 14)]


@CORES
def test_its_file_comes_back_as_it_was(core: str) -> None:
    policy = recurrent(core)
    again, version = decode_policy(encode_policy(policy, 4))
    assert version == 4 and isinstance(again, RecurrentActorCritic)
    assert {name: array.tobytes() for name, array in state_arrays(again).items()} == {
        name: array.tobytes() for name, array in state_arrays(policy).items()
    }


def test_policies_without_a_core_remember_nothing() -> None:
    policy = build_policies({"p": BOX}, {"p": PolicyConfig()}, PPOConfig(), seed=1)["p"]
    assert policy.kind == "actor_critic" and policy.state_size == 0 and policy.initial_state(4).shape == (4, 0)
    assert with_states({"p": policy}, {"p": 4}) == {}
    rows = {"obs": observed()[0]}
    params, state = policy.step(rows, policy.initial_state(SLOTS))
    assert torch.equal(params, policy.action_parameters(rows)) and state.shape == (SLOTS, 0)


def test_observations_alone_are_not_enough_for_it() -> None:
    with pytest.raises(NotImplementedError, match="recurrent_actor_critic has no parameters for observations alone"):
        recurrent("gru").action_parameters({"obs": observed()[0]})


class Single(AlgorithmConfig):
    """An algorithm that learns single steps."""

    name: str = "single"


def test_a_core_is_refused_where_nobody_learns_it() -> None:
    with pytest.raises(ConfigError, match=r"policies\.p\.core=lstm: algorithm single learns single steps .* core=none"):
        build_policies({"p": BOX}, {"p": configured("lstm")}, Single(), seed=1)
    with pytest.raises(ConfigError, match=r"core=gru with share_encoder=false: .* set share_encoder=true"):
        minimal_config(policies={"default": {"core": "gru"}})
    with pytest.raises(ConfigError, match=r"policies\.default\.core=gru with a dataset: .* set core=none"):
        minimal_config(
            policies={"default": {"core": "gru", "share_encoder": True}},
            dataset={"path": "/d"},
            algorithm={"name": "bc"},
        )


def deployed(core: str = "lstm") -> tuple[RecurrentActorCritic, DeployedPolicy]:
    policy = recurrent(core)
    return policy, DeployedPolicy(policy, 1)


@CORES
def test_a_deployed_policy_remembers_until_it_is_reset(core: str) -> None:
    policy, acting = deployed(core)
    obs = observed()[:, :1]
    with torch.no_grad():
        params = policy.sequence({"obs": obs}, policy.initial_state(1), ends()[:, :1])[0]
    means = params[:, 0, :2].clamp(-1, 1).numpy()
    for _ in range(2):
        for step in range(STEPS):
            np.testing.assert_allclose(acting.act(obs[step, 0].numpy()), means[step], rtol=1e-4, atol=1e-5)
        again = acting.act(obs[0, 0].numpy())
        assert not np.allclose(again, means[0], atol=1e-4), "it remembers the episode so far"
        acting.reset()


def test_rows_of_a_batch_are_reset_by_themselves() -> None:
    policy, acting = deployed()
    obs, over = observed(), ends((3, 1), (3, 4))
    with torch.no_grad():
        params = policy.sequence({"obs": obs}, policy.initial_state(SLOTS), over)[0]
    for step in range(STEPS):
        found = acting.act_batch(obs[step].numpy())
        np.testing.assert_allclose(found, params[step, :, :2].clamp(-1, 1), rtol=1e-4, atol=1e-5)
        acting.reset(over[step].numpy())


def test_a_batch_of_another_size_is_refused_until_it_is_reset() -> None:
    _, acting = deployed()
    acting.act_batch(observed()[0].numpy())
    with pytest.raises(UserError, match=r"1 observations, but the policy remembers 5 episodes; call reset\(\)"):
        acting.act(observed()[1, 0].numpy())
    with pytest.raises(UserError, match=r"`over` has the shape \(2,\), the batch so far has 5 rows"):
        acting.reset([True, False])
    acting.reset()
    acting.act(observed()[1, 0].numpy())
