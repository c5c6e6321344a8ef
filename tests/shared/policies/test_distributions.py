"""Action distributions and actors agree with `torch.distributions`, and sample what they say they do."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch.distributions import (
    AffineTransform,
    Categorical,
    Distribution,
    Independent,
    Normal,
    TanhTransform,
    TransformedDistribution,
    kl_divergence,
)

from stagecoach.rollout_worker.environments.description import describe_space
from stagecoach.shared.base.errors import UnsupportedSpace
from stagecoach.shared.policies.continuous import BoundedActions, SquashedGaussian
from stagecoach.shared.policies.distributions import ActionDistribution
from tests.support.experience.policies import SIGHT, built_policy, generator

ROWS = 7


def distribution_of(space: spaces.Space[object]) -> ActionDistribution:
    return ActionDistribution(describe_space(space))


def random_params(distribution: ActionDistribution, rows: int = ROWS) -> Tensor:
    """Moderate ones: no log σ near its bounds."""
    return torch.randn(rows, distribution.parameters, generator=generator(3)) * 0.5


def references(space: spaces.Space[Any], params: Tensor) -> list[Distribution]:
    """One of PyTorch's for each row and each of the numbers (a Box) or choices of an action, in their order."""
    found: list[Distribution] = []
    start = 0
    for leaf in describe_space(space).leaves:
        size = int(np.prod(leaf.shape))
        if leaf.kind == "box":
            mean, log_std = params[:, start : start + 2 * size].split(size, dim=1)
            found += [Normal(mean[:, i], log_std[:, i].exp()) for i in range(size)]
            start += 2 * size
        for choices in () if leaf.kind == "box" else leaf.nvec:
            found.append(Categorical(logits=params[:, start : start + choices]))
            start += choices
    assert start == params.shape[1]
    return found


@pytest.mark.parametrize(
    ("space", "shapes"),
    [
        (spaces.Discrete(5), {"action": ()}),
        (spaces.MultiDiscrete([3, 2, 4]), {"action": (3,)}),
        (spaces.MultiDiscrete(np.array([[3, 2], [4, 5]])), {"action": (2, 2)}),
        (spaces.MultiBinary(3), {"action": (3,)}),
        (spaces.Box(-1.0, 1.0, (2, 3)), {"action": (2, 3)}),
        (
            spaces.Dict({
                "arm": spaces.Box(-1.0, 1.0, (2,)), "hands": spaces.Tuple((spaces.Discrete(3), spaces.MultiBinary(2)))
            }),
            {"action.arm": (2,), "action.hands.0": (), "action.hands.1": (2,)},
        ),
    ],
    ids=str,
)  # fmt: skip
def test_distribution_matches_product_of_torch_distributions(
    space: spaces.Space[Any], shapes: dict[str, tuple[int, ...]]
) -> None:
    distribution = distribution_of(space)
    params = random_params(distribution).requires_grad_()
    theirs = references(space, params)
    action, mode = distribution.sample(params.detach(), generator(0)), distribution.mode(params)
    assert distribution.names == tuple(shapes)
    assert {name: tuple(array.shape[1:]) for name, array in action.items()} == shapes
    numbers, best = (torch.cat([part.reshape(ROWS, -1) for part in given.values()], 1) for given in (action, mode))
    log_prob = torch.stack([part.log_prob(numbers[:, i]) for i, part in enumerate(theirs)]).sum(0)
    entropy = torch.stack([part.entropy() for part in theirs]).sum(0)
    torch.testing.assert_close(distribution.log_prob(params, action), log_prob, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(distribution.entropy(params), entropy, rtol=1e-5, atol=1e-5)
    ours = torch.stack(distribution.log_prob_and_entropy(params, action)).sum(0)
    torch.testing.assert_close(ours, log_prob + entropy, rtol=1e-5, atol=1e-5)
    (found,), (expected,) = (torch.autograd.grad(both.sum(), params) for both in (ours, log_prob + entropy))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(best, torch.stack([part.mode for part in theirs], 1).to(best.dtype), rtol=0, atol=0)
    other = params.detach().flip(0) + torch.linspace(0, 1, params.shape[1])
    divergence = torch.stack(list(map(kl_divergence, theirs, references(space, other)))).sum(0)
    torch.testing.assert_close(distribution.divergence(params, other), divergence, rtol=1e-4, atol=1e-6)
    assert distribution.divergence(params, params).abs().max() < 1e-6 < distribution.divergence(params, other).min()


def test_extreme_parameters_stay_finite() -> None:
    choices, extreme = distribution_of(spaces.Discrete(3)), torch.tensor([[1e4, -1e4, 0.0]])
    assert choices.sample(extreme, generator(0))["action"].tolist() == [0]
    assert choices.log_prob(extreme, {"action": torch.tensor([0])}).item() == 0.0
    assert choices.entropy(extreme).item() == 0.0
    distribution = distribution_of(spaces.Box(-1.0, 1.0, (2,)))
    params = torch.tensor([[0.5, -0.5, -1000.0, 1000.0]], requires_grad=True)
    action = distribution.sample(params.detach(), generator(0))
    log_prob = distribution.log_prob(params, {"action": action["action"]})
    log_prob.sum().backward()
    assert bool(torch.isfinite(log_prob).all()) and bool(torch.isfinite(distribution.entropy(params)).all())
    assert params.grad is not None
    assert params.grad[0, 2:].tolist() == [0.0, 0.0]


def test_choices_are_sampled_by_probability() -> None:
    distribution = distribution_of(spaces.MultiDiscrete([3, 2]))
    probabilities = torch.tensor([0.5, 0.3, 0.2, 0.9, 0.1])
    rows = 40_000
    params = probabilities.log().expand(rows, -1)
    actions = distribution.sample(params, generator(1))["action"]
    first = torch.bincount(actions[:, 0], minlength=3) / rows
    second = torch.bincount(actions[:, 1], minlength=2) / rows
    torch.testing.assert_close(torch.cat([first, second]), probabilities, rtol=0, atol=0.012)  # five deviations
    together = ((actions[:, 0] == 0) & (actions[:, 1] == 1)).float().mean()
    assert together.item() == pytest.approx(0.05, abs=0.006)  # independent of each other


def test_gaussian_samples_have_their_mean_and_deviation() -> None:
    distribution = distribution_of(spaces.Box(-1.0, 1.0, (2,)))
    params = torch.tensor([0.3, -2.0, 0.0, -1.0]).expand(40_000, -1)
    actions = distribution.sample(params, generator(2))["action"]
    torch.testing.assert_close(actions.mean(0), torch.tensor([0.3, -2.0]), rtol=0, atol=0.025)
    torch.testing.assert_close(actions.std(0), torch.tensor([0.0, -1.0]).exp(), rtol=0.02, atol=0)


def test_sampling_follows_the_generator_alone() -> None:
    distribution = distribution_of(spaces.Dict({"a": spaces.Discrete(4), "b": spaces.Box(-1.0, 1.0, (2,))}))
    params = random_params(distribution)
    drawn: list[dict[str, Tensor]] = []
    for seed in (5, 5, 6):
        torch.manual_seed(len(drawn))  # the global random state must not matter
        drawn.append(distribution.sample(params, generator(seed)))
    assert all(torch.equal(drawn[0][name], drawn[1][name]) for name in drawn[0])
    assert not torch.equal(drawn[0]["action.b"], drawn[2]["action.b"])


LOW, HIGH = np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32)
NESTED = spaces.Dict({"arm": spaces.Box(LOW, HIGH), "grip": spaces.Box(-1.0, 1.0, (1, 1), np.float64)})


def squashed(action: spaces.Space[Any]) -> SquashedGaussian:
    return SquashedGaussian(BoundedActions(describe_space(action)))


def test_squashed_density_matches_torch() -> None:
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
    normal = Independent(Normal(mean, log_std.exp()), 1)
    theirs = TransformedDistribution(normal, [TanhTransform(), affine], validate_args=False)
    inside = ((flat - (low + high) / 2) / ((high - low) / 2)).abs().amax(dim=1) < 0.999  # beyond, float32 is coarse
    assert inside.sum() > 400
    found = distribution.log_prob(params, actions).to(torch.float64)
    expected = theirs.log_prob(flat.clamp(low, high))
    torch.testing.assert_close(found[inside], expected[inside], rtol=1e-3, atol=2e-3)
    unit, log_prob = distribution.reparameterized(params, torch.randn(500, 3, generator=generator(2)))
    inside = unit.abs().amax(dim=1) < 0.999
    assert inside.sum() > 400
    plain = TransformedDistribution(normal, [TanhTransform()], validate_args=False).log_prob(unit.to(torch.float64))
    torch.testing.assert_close(log_prob.to(torch.float64)[inside], plain[inside], rtol=1e-3, atol=2e-3)


def test_squashed_gradients_match_finite_differences() -> None:
    distribution = squashed(spaces.Box(-3.0, 1.0, (2,)))
    noise = torch.randn(4, 2, generator=generator(1), dtype=torch.float64)
    params = torch.randn(4, 4, generator=generator(), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda given: distribution.reparameterized(given, noise), (params,))


@pytest.mark.parametrize("mean", [-60.0, 60.0])
@pytest.mark.parametrize("log_std", [-40.0, 0.0, 40.0])
def test_saturated_actions_have_finite_densities_and_gradients(mean: float, log_std: float) -> None:
    distribution = squashed(spaces.Box(-2.0, 2.0, (1,)))
    params = torch.tensor([[mean, log_std]], requires_grad=True)
    action, log_prob = distribution.reparameterized(params, torch.ones(1, 1))
    (action.sum() + log_prob.sum()).backward()
    assert torch.isfinite(log_prob).all() and params.grad is not None and torch.isfinite(params.grad).all()
    taken = distribution.sample(params.detach(), generator())
    assert abs(float(taken["action"])) <= 2.0
    assert torch.isfinite(distribution.log_prob(params, taken)).all()


@pytest.mark.parametrize("name", ["sac", "td3", "ddpg"])
def test_actions_reach_the_bounds_and_stay_within(name: str) -> None:
    policy = built_policy(SIGHT, NESTED, name)
    with torch.no_grad():
        for bias, end in ((30.0, HIGH), (-30.0, LOW)):
            policy.get_parameter("head.bias")[:3] = bias
            mode = policy.distribution.mode(policy.action_parameters({"obs": torch.randn(5, 3)}))
            np.testing.assert_allclose(mode["action.arm"].numpy(), np.broadcast_to(end, (5, 2)), rtol=1e-6)


def test_log_std_init_is_the_spread_at_the_start() -> None:
    policy = built_policy(SIGHT, NESTED, "sac", log_std_init=-1.25)
    params = policy.action_parameters({"obs": torch.zeros(2, 3)})
    assert (params[:, 3:] == -1.25).all() and (params[:, :3] == 0).all()


def test_deterministic_policy_samples_its_mode() -> None:
    policy = built_policy(SIGHT, NESTED, "td3")
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
def test_spaces_without_finite_bounds_are_rejected(name: str, action: spaces.Space[Any]) -> None:
    with pytest.raises(UnsupportedSpace, match="continuous actions need Boxes of floats with finite bounds") as refused:
        built_policy(SIGHT, action, name)
    assert "\n" not in str(refused.value)


def test_actor_rejects_integers_and_choice_gradients() -> None:
    with pytest.raises(UnsupportedSpace, match="Box of int32 cannot be sampled; use floats"):
        distribution_of(spaces.Box(0, 5, (2,), np.int32))
    for name in ("td3", "ddpg"):
        with pytest.raises(UnsupportedSpace, match="discrete of int64"):
            built_policy(SIGHT, spaces.Discrete(3), name)
