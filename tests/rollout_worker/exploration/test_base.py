"""Random actions cover their space, with the probability of each."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from stagecoach.rollout_worker.exploration.base import RandomActing
from tests.support.environments.small import ACTIONS
from tests.support.experience.exploration import ROWS, observations, policy_for
from tests.support.experience.policies import generator


@pytest.mark.parametrize("name", ACTIONS)
def test_random_acting_covers_action_space(name: str) -> None:
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


@pytest.mark.parametrize(
    ("action", "volume"),
    [
        (ACTIONS["discrete"], 4), (ACTIONS["multi_discrete_matrix"], 120), (ACTIONS["multi_binary"], 16),
        (ACTIONS["box"], 1.0), (ACTIONS["box64"], 0.04), (ACTIONS["dict"], 0.2**4 * 2), (ACTIONS["tuple"], 12),
    ],
    ids=str,
)  # fmt: skip
def test_random_acting_log_prob_is_uniform(action: spaces.Space[object], volume: float) -> None:
    policy = policy_for(action)
    actions, params = RandomActing().act(policy, observations(50), generator())
    told = RandomActing().log_prob(policy, params, actions)
    assert told.shape == (50,) and told.tolist() == pytest.approx([-np.log(volume)] * 50, rel=1e-5, abs=1e-5)


def test_random_acting_log_prob_without_bounds() -> None:
    def told(action: spaces.Space[object]) -> tuple[torch.Tensor, torch.Tensor]:
        policy = policy_for(action)
        actions, params = RandomActing().act(policy, observations(ROWS), generator())
        return actions["action"], RandomActing().log_prob(policy, params, actions)

    normal = torch.distributions.Normal(0.0, 1.0)
    drawn, found = told(spaces.Box(-np.inf, np.inf, (2,), np.float32))
    torch.testing.assert_close(drawn.mean(0), torch.zeros(2), rtol=0, atol=0.1)
    torch.testing.assert_close(drawn.std(0), torch.ones(2), rtol=0, atol=0.1)
    torch.testing.assert_close(found, normal.log_prob(drawn).sum(dim=1))  # type: ignore[no-untyped-call]
    drawn, found = told(spaces.Box(np.array([0, -1, -3e38], np.float32), np.array([np.inf, 2, 3e38], np.float32)))
    expected = normal.log_prob(drawn[:, [0, 2]]).sum(dim=1) - np.log(3)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found, expected)
    assert told(spaces.Box(np.array([0, 2], np.float32), np.array([1, 2], np.float32)))[1].isnan().all()
