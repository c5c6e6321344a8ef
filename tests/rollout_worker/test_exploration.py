"""How actions are chosen: sampled, greedy, or random within the space."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rollout_worker.exploration import Greedy, RandomActing, Sampling
from rollout_worker.making import describe_space
from shared.algorithm_configs.ppo import PPOConfig
from shared.config import PolicyConfig
from shared.policies.policy import Policy
from shared.policies.registry import build_policies
from shared.spaces import PolicySpaces
from tests.environments_for_tests import ACTIONS

SIGHT = spaces.Box(-1.0, 1.0, (3,), np.float32)


def policy_for(action: spaces.Space[object]) -> Policy:
    described = PolicySpaces(describe_space(SIGHT), describe_space(action))
    return build_policies({"p": described}, {"p": PolicyConfig()}, PPOConfig(), seed=0)["p"]


def observations(rows: int) -> dict[str, torch.Tensor]:
    return {"obs": torch.randn(rows, 3, generator=torch.Generator().manual_seed(1))}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@torch.no_grad()
def test_sampling_draws_from_the_policys_distribution_and_tells_its_parameters() -> None:
    policy = policy_for(spaces.Discrete(3))
    policy.get_parameter("head.bias").copy_(torch.tensor([0.0, 2.0, 1.0]))
    actions, params = Sampling().act(policy, observations(20_000), generator())
    assert params is not None and torch.equal(params, policy.action_parameters(observations(20_000)))
    found = torch.bincount(actions["action"], minlength=3) / 20_000
    torch.testing.assert_close(found, torch.softmax(params, 1).mean(0), rtol=0, atol=0.02)


@torch.no_grad()
def test_greedy_takes_the_most_probable_action_every_time() -> None:
    policy = policy_for(spaces.Tuple((spaces.Discrete(3), spaces.Box(-1.0, 1.0, (2,)))))
    actions, params = Greedy().act(policy, observations(50), generator(1))
    again, _ = Greedy().act(policy, observations(50), generator(2))
    assert params is not None
    assert torch.equal(actions["action.0"], params[:, :3].argmax(1)) and torch.equal(
        actions["action.1"], params[:, 3:5]
    )
    assert all(torch.equal(actions[name], again[name]) for name in actions)


@pytest.mark.parametrize("name", ACTIONS)
def test_random_acting_stays_in_the_space_and_reaches_all_of_it(name: str) -> None:
    policy = policy_for(ACTIONS[name])
    actions, _ = RandomActing().act(policy, observations(500), generator())
    for leaf in policy.spaces.action.leaves:
        column = actions[leaf.column("action")].numpy()
        assert column.shape == (500, *leaf.shape)
        if leaf.kind == "box":
            low, high = leaf.bounds()
            width = high - low
            assert (column >= low).all() and (column <= high).all()
            assert (column.min(0) < low + 0.05 * width).all() and (column.max(0) > high - 0.05 * width).all()
        else:
            assert column.min() >= 0 and (column.reshape(500, -1).max(0) == np.array(leaf.nvec) - 1).all()
            shares = [np.bincount(part, minlength=n) / 500 for part, n in zip(column.reshape(500, -1).T, leaf.nvec)]
            assert all(np.abs(share - 1 / len(share)).max() < 0.12 for share in shares)


def test_random_acting_without_bounds_is_standard_normal() -> None:
    policy = policy_for(spaces.Box(-np.inf, np.inf, (2,), np.float32))
    column = RandomActing().act(policy, observations(4000), generator())[0]["action"]
    assert column.shape == (4000, 2)
    torch.testing.assert_close(column.mean(0), torch.zeros(2), rtol=0, atol=0.1)
    torch.testing.assert_close(column.std(0), torch.ones(2), rtol=0, atol=0.1)


FREE = spaces.Box(-np.inf, np.inf, (2,), np.float32)
HALF = spaces.Box(np.array([0, -1, -3e38], np.float32), np.array([np.inf, 2, 3e38], np.float32))
SINGLE = spaces.Box(np.array([0, 2], np.float32), np.array([1, 2], np.float32))


@pytest.mark.parametrize(
    ("action", "volume"),
    [
        (ACTIONS["discrete"], 4), (ACTIONS["multi_discrete_matrix"], 120), (ACTIONS["multi_binary"], 16),
        (ACTIONS["box"], 1.0), (ACTIONS["box64"], 0.04), (ACTIONS["dict"], 0.2**4 * 2), (ACTIONS["tuple"], 12),
    ],
    ids=str,
)  # fmt: skip
def test_random_acting_tells_one_over_the_volume_of_the_space(action: spaces.Space[object], volume: float) -> None:
    policy = policy_for(action)
    actions, params = RandomActing().act(policy, observations(50), generator())
    told = RandomActing().log_prob(policy, params, actions)
    assert told.shape == (50,) and told.tolist() == pytest.approx([-np.log(volume)] * 50, rel=1e-5, abs=1e-5)


def test_where_a_box_has_no_bounds_it_tells_the_normal_density_and_of_a_single_value_nothing() -> None:
    def told(action: spaces.Space[object]) -> tuple[torch.Tensor, torch.Tensor]:
        policy = policy_for(action)
        actions, params = RandomActing().act(policy, observations(50), generator())
        return actions["action"], RandomActing().log_prob(policy, params, actions)

    normal = torch.distributions.Normal(0.0, 1.0)
    drawn, found = told(FREE)
    torch.testing.assert_close(found, normal.log_prob(drawn).sum(dim=1))  # type: ignore[no-untyped-call]
    drawn, found = told(HALF)
    expected = normal.log_prob(drawn[:, [0, 2]]).sum(dim=1) - np.log(3)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found, expected)
    assert told(SINGLE)[1].isnan().all()


@pytest.mark.parametrize("exploration", [Sampling(), RandomActing()])
def test_the_generator_alone_decides(exploration: Sampling | RandomActing) -> None:
    policy = policy_for(spaces.Box(-1.0, 1.0, (2,), np.float32))
    first, _ = exploration.act(policy, observations(5), generator(3))
    torch.manual_seed(99)
    same, _ = exploration.act(policy, observations(5), generator(3))
    other, _ = exploration.act(policy, observations(5), generator(4))
    assert torch.equal(first["action"], same["action"]) and not torch.equal(first["action"], other["action"])
