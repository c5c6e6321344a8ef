"""Actors: squashed Gaussians and certain actions, in the environment's own units."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.distributions import AffineTransform, Independent, Normal, TanhTransform, TransformedDistribution

from rollout_worker.making import describe_space
from shared.algorithm_configs.registry import ALGORITHMS
from shared.algorithm_configs.section import AlgorithmConfig
from shared.config import PolicyConfig
from shared.errors import UnsupportedSpace
from shared.policies.actor import Actor, Deterministic, SquashedGaussian
from shared.policies.bounded_actions import BoundedActions
from shared.policies.codec import decode_policy, encode_policy, state_arrays
from shared.policies.policy import Policy
from shared.policies.registry import build_policies
from shared.spaces import PolicySpaces

SIGHT = spaces.Box(-1.0, 1.0, (3,), np.float32)
LOW, HIGH = np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32)
NESTED = spaces.Dict({"arm": spaces.Box(LOW, HIGH), "grip": spaces.Box(-1.0, 1.0, (1, 1), np.float64)})


def built(name: str, action: spaces.Space[Any], **policy: Any) -> Policy:
    described = PolicySpaces(describe_space(SIGHT), describe_space(action))
    algorithm: AlgorithmConfig = ALGORITHMS[name].model_validate({"name": name})
    return build_policies({"p": described}, {"p": PolicyConfig.model_validate(policy)}, algorithm, seed=0)["p"]


def squashed(action: spaces.Space[Any]) -> SquashedGaussian:
    return SquashedGaussian(BoundedActions(describe_space(action)))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_density_is_that_of_torchs_transformed_distribution() -> None:
    distribution = squashed(NESTED)
    params = torch.randn(500, 6, generator=generator()) * 0.5
    actions = distribution.sample(params, generator(1))
    assert {name: tuple(array.shape) for name, array in actions.items()} == {
        "action.arm": (500, 2), "action.grip": (500, 1, 1),
    }  # fmt: skip
    flat = torch.cat([actions["action.arm"], actions["action.grip"].flatten(1)], dim=1).to(torch.float64)
    low, high = torch.tensor([-2.0, 0.0, -1.0]), torch.tensor([2.0, 10.0, 1.0])
    mean, log_std = params.to(torch.float64).clamp(max=2.0).chunk(2, dim=1)  # the bound of log σ; no mean is as large
    affine = AffineTransform(((low + high) / 2).to(torch.float64), ((high - low) / 2).to(torch.float64))
    theirs = TransformedDistribution(
        Independent(Normal(mean, log_std.exp()), 1), [TanhTransform(), affine], validate_args=False
    )
    inside = ((flat - (low + high) / 2) / ((high - low) / 2)).abs().amax(dim=1) < 0.999  # beyond, float32 is coarse
    assert inside.sum() > 400
    found = distribution.log_prob(params, actions).to(torch.float64)
    expected = theirs.log_prob(flat.clamp(low, high))  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found[inside], expected[inside], rtol=1e-3, atol=2e-3)


def test_what_is_reparameterised_has_the_density_of_what_was_drawn() -> None:
    distribution = squashed(spaces.Box(-1.0, 1.0, (2,)))
    params, noise = torch.randn(300, 4, generator=generator()) * 0.5, torch.randn(300, 2, generator=generator(1))
    action, log_prob = distribution.reparameterised(params, noise)
    inside = action.abs().amax(dim=1) < 0.999  # beyond, float32 is coarse
    assert inside.sum() > 200
    found = distribution.log_prob(params, {"action": action})
    torch.testing.assert_close(log_prob[inside], found[inside], rtol=1e-3, atol=2e-3)


def test_its_gradients_are_those_of_finite_differences() -> None:
    distribution = squashed(spaces.Box(-3.0, 1.0, (2,)))
    noise = torch.randn(4, 2, generator=generator(1), dtype=torch.float64)
    params = torch.randn(4, 4, generator=generator(), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda given: distribution.reparameterised(given, noise), (params,))


def test_the_density_over_the_box_sums_to_one() -> None:
    distribution = squashed(spaces.Box(-2.0, 6.0, (1,)))
    grid = torch.linspace(-2.0, 6.0, 20_001)
    params = torch.tensor([[0.3, -0.5]]).expand(len(grid), -1)
    total = torch.trapezoid(distribution.log_prob(params, {"action": grid[:, None]}).exp(), grid)
    assert abs(float(total) - 1.0) < 1e-3


@pytest.mark.parametrize("mean", [-60.0, 60.0])
@pytest.mark.parametrize("log_std", [-40.0, 0.0, 40.0])
def test_saturated_actions_have_finite_densities_and_gradients(mean: float, log_std: float) -> None:
    distribution = squashed(spaces.Box(-2.0, 2.0, (1,)))
    params = torch.tensor([[mean, log_std]], requires_grad=True)
    action, log_prob = distribution.reparameterised(params, torch.ones(1, 1))
    (action.sum() + log_prob.sum()).backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(log_prob).all() and params.grad is not None and torch.isfinite(params.grad).all()
    taken = distribution.sample(params.detach(), generator())
    assert abs(float(taken["action"])) <= 2.0
    assert torch.isfinite(distribution.log_prob(params, taken)).all()


@pytest.mark.parametrize("name", ["sac", "td3", "ddpg"])
def test_actions_reach_the_bounds_and_stay_within(name: str) -> None:
    policy = built(name, NESTED)
    with torch.no_grad():
        for bias, end in ((30.0, HIGH), (-30.0, LOW)):
            policy.get_parameter("head.bias")[:3] = bias
            mode = policy.distribution.mode(policy.action_parameters({"obs": torch.randn(5, 3)}))
            np.testing.assert_allclose(mode["action.arm"].numpy(), np.broadcast_to(end, (5, 2)), rtol=1e-6)


def test_log_std_init_is_the_spread_at_the_start() -> None:
    policy = built("sac", NESTED, log_std_init=-1.25)
    params = policy.action_parameters({"obs": torch.zeros(2, 3)})
    assert (params[:, 3:] == -1.25).all() and (params[:, :3] == 0).all()


def test_a_deterministic_policy_draws_what_is_best() -> None:
    policy = built("td3", NESTED)
    params = policy.action_parameters({"obs": torch.randn(4, 3)})
    best, drawn = policy.distribution.mode(params), policy.distribution.sample(params, generator())
    assert all(torch.equal(best[name], drawn[name]) for name in best)
    assert policy.distribution.log_prob(params, best).isnan().all()


@pytest.mark.parametrize("name", ["sac", "td3", "ddpg"])
@pytest.mark.parametrize(
    "action",
    [
        spaces.Box(-np.inf, np.inf, (2,)),
        spaces.Box(0.0, np.inf, (2,)),
        spaces.Box(0, 5, (2,), np.int64),
        spaces.Box(np.array([0.0, 1.0], np.float32), np.array([1.0, 1.0], np.float32)),
        spaces.Tuple((spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(2))),
    ],
    ids=["unbounded", "half bounded", "integers", "no width", "mixed"],
)
def test_spaces_without_finite_bounds_are_refused_in_one_line(name: str, action: spaces.Space[Any]) -> None:
    with pytest.raises(UnsupportedSpace, match="continuous actions need Boxes of floats with finite bounds") as refused:
        built(name, action)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["td3", "ddpg"])
def test_discrete_actions_are_refused_where_a_gradient_has_to_go_through_them(name: str) -> None:
    with pytest.raises(UnsupportedSpace, match="discrete of int64"):
        built(name, spaces.Discrete(3))


@pytest.mark.parametrize(("name", "kind"), [("sac", Actor), ("td3", Deterministic)])
def test_its_file_holds_it_and_nothing_that_follows_from_the_space(name: str, kind: type[Policy]) -> None:
    policy = built(name, NESTED, normalise_observations=True)
    read, version = decode_policy(encode_policy(policy, 7))
    assert isinstance(read, kind) and version == 7
    assert not [key for key in state_arrays(policy) if key.startswith("bounds")]
    sight = {"obs": torch.randn(6, 3, generator=generator())}
    assert torch.equal(read.action_parameters(sight), policy.action_parameters(sight))
    ours, theirs = (one.distribution.mode(one.action_parameters(sight)) for one in (policy, read))
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
