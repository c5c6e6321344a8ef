"""Noise on continuous actions and on weights: how large it is, how long it lasts, and that it begins anew."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from pydantic import TypeAdapter

from rollout_worker.action_noise import TruncatedGaussianNoise
from rollout_worker.exploration import Exploration
from rollout_worker.exploring import make_exploration
from rollout_worker.making import describe_space
from shared.algorithm_configs.sac import SACConfig
from shared.algorithm_configs.td3 import TD3Config
from shared.config import PolicyConfig
from shared.exploration_config import NoiseField
from shared.policies.codec import state_arrays
from shared.policies.policy import Policy
from shared.policies.registry import build_policies
from shared.spaces import Array, PolicySpaces
from shared.steps import Counters

LOW, HIGH = np.array([-100.0, 0.0], np.float32), np.array([100.0, 400.0], np.float32)
ROWS = 4000


def exploring(counters: Counters | None = None, **section: Any) -> Exploration:
    return make_exploration(TypeAdapter(NoiseField).validate_python(section), counters or Counters())


def policy() -> Policy:
    described = PolicySpaces(describe_space(spaces.Box(-1.0, 1.0, (3,))), describe_space(spaces.Box(LOW, HIGH)))
    return build_policies({"p": described}, {"p": PolicyConfig()}, TD3Config(), seed=0)["p"]


@torch.no_grad()
def acted(exploration: Exploration, acting: Policy, steps: int, seed: int = 0, rows: int = ROWS) -> Array:
    """`[steps, rows, 2]`: how far the actions are from the best one, in halves of the range."""
    generator, sight = torch.Generator().manual_seed(seed), {"obs": torch.zeros(rows, 3)}
    best = acting.distribution.mode(acting.action_parameters(sight))["action"].numpy()
    taken = []
    for _ in range(steps):
        actions, params = exploration.act(acting, sight, generator)
        assert params is not None
        assert exploration.log_prob(acting, params, actions).isnan().all() or isinstance(
            exploration, TruncatedGaussianNoise
        )
        taken.append((actions["action"].numpy() - best) / ((HIGH - LOW) / 2))
        assert (actions["action"].numpy() >= LOW).all() and (actions["action"].numpy() <= HIGH).all()
    return np.stack(taken)


def test_gaussian_noise_has_its_deviation_in_halves_of_the_range_and_no_memory() -> None:
    noise = acted(exploring(kind="gaussian", sigma=0.2), policy(), 2)
    np.testing.assert_allclose(noise.std(axis=1), 0.2, rtol=0.06)
    assert abs(np.corrcoef(noise[0, :, 0], noise[1, :, 0])[0, 1]) < 0.06
    bounded = acted(exploring(kind="gaussian", sigma=0.2, bound=1.5), policy(), 1)
    assert np.abs(bounded).max() == pytest.approx(0.3, abs=1e-5)


@pytest.mark.parametrize(("sigma", "outputs"), [(0.1, 0.0), (0.5, 1.0), (0.5, -9.0), (3.0, 0.4)])
@torch.no_grad()
def test_truncated_noise_is_the_normal_distribution_within_the_bounds_and_tells_its_density(
    sigma: float, outputs: float
) -> None:
    acting = policy()
    acting.get_parameter("head.weight").zero_()
    acting.get_parameter("head.bias").fill_(outputs)
    middle, exploration = math.tanh(outputs), exploring(kind="truncated_gaussian", sigma=sigma)
    sight = {"obs": torch.zeros(ROWS, 3)}
    actions, params = exploration.act(acting, sight, torch.Generator().manual_seed(0))
    assert params is not None
    drawn = (actions["action"].numpy() - (HIGH + LOW) / 2) / ((HIGH - LOW) / 2)
    assert drawn.min() >= -1 and drawn.max() <= 1
    assert (np.abs(drawn) == 1).mean() < 0.001, "nothing is heaped up at the bounds"
    places = np.linspace(-1, 1, 20_001)
    density = np.exp(-0.5 * ((places - middle) / sigma) ** 2)
    density /= density.sum() * (places[1] - places[0])
    below = np.cumsum(density) * (places[1] - places[0])
    for mark in np.quantile(places, np.linspace(0.05, 0.95, 10)):
        expected = np.interp(mark, places, below)
        np.testing.assert_allclose((drawn < mark).mean(axis=0), expected, atol=0.03)
    told = exploration.log_prob(acting, params, actions).numpy()
    of_each = np.log(np.interp(drawn, places, density) / ((HIGH - LOW) / 2))
    np.testing.assert_allclose(told, of_each.sum(axis=1), atol=0.01)


@torch.no_grad()
def test_truncated_noise_of_nothing_is_the_best_action_and_what_a_policy_draws_itself_has_no_known_density() -> None:
    acting, sight = policy(), {"obs": torch.randn(50, 3, generator=torch.Generator().manual_seed(1))}
    still = exploring(kind="truncated_gaussian", sigma=0.0)
    actions, params = still.act(acting, sight, torch.Generator())
    assert params is not None and still.log_prob(acting, params, actions).isnan().all()
    assert torch.equal(actions["action"], acting.distribution.mode(params)["action"])
    described = PolicySpaces(describe_space(spaces.Box(-1.0, 1.0, (3,))), describe_space(spaces.Box(LOW, HIGH)))
    drawing = build_policies({"p": described}, {"p": PolicyConfig()}, SACConfig(), seed=0)["p"]
    noisy = exploring(kind="truncated_gaussian", sigma=0.3)
    actions, params = noisy.act(drawing, sight, torch.Generator())
    assert params is not None and noisy.log_prob(drawing, params, actions).isnan().all()
    assert (actions["action"].numpy() >= LOW).all() and (actions["action"].numpy() <= HIGH).all()


def test_ornstein_uhlenbeck_noise_is_as_spread_at_the_first_step_as_later_and_goes_on() -> None:
    noise = acted(exploring(kind="ou", sigma=0.1, theta=0.2), policy(), 12)
    np.testing.assert_allclose(noise.std(axis=1), 0.1 / math.sqrt(1 - 0.8**2), rtol=0.06)
    for lag in (1, 5):
        found = np.corrcoef(noise[0, :, 1], noise[lag, :, 1])[0, 1]
        assert found == pytest.approx(0.8**lag, abs=0.06), f"after {lag} steps"


@pytest.mark.parametrize(
    "section",
    [{"kind": "ou"}, {"kind": "gaussian"}, {"kind": "parameter_noise", "sigma": 0.2}, {"kind": "truncated_gaussian"}],
)
def test_a_fragment_is_the_same_whenever_it_is_acted_and_the_next_one_begins_anew(section: dict[str, Any]) -> None:
    acting = policy()
    first, again = (acted(exploring(**section), acting, 3, rows=5) for _ in range(2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, acted(exploring(**section), acting, 3, seed=1, rows=5))


def test_parameter_noise_is_drawn_once_and_leaves_the_policy_as_it_was() -> None:
    acting = policy()
    before, exploration = state_arrays(acting), exploring(kind="parameter_noise", sigma=0.1)
    noise = acted(exploration, acting, 3, rows=6)
    np.testing.assert_allclose(noise, np.broadcast_to(noise[0, 0], noise.shape), atol=1e-6)
    assert (np.abs(noise) > 1e-4).all(), "equal observations, equal actions, other than the best"
    assert all(np.array_equal(array, before[name]) for name, array in state_arrays(acting).items())
    assert (acted(exploring(kind="parameter_noise", sigma=0.0), acting, 1) == 0).all()


def test_two_policies_have_noise_of_their_own() -> None:
    exploration, one, other = exploring(kind="ou", sigma=0.1, theta=0.01), policy(), policy()
    first = acted(exploration, one, 1, seed=1)
    acted(exploration, other, 1, seed=2)
    assert np.corrcoef(first[0, :, 0], acted(exploration, one, 1, seed=3)[0, :, 0])[0, 1] > 0.9


def test_schedules_are_functions_of_the_counters() -> None:
    sigma = {"kind": "linear", "start": 0.3, "end": 0.0, "over": "100 env_steps"}
    ended = Counters(env_steps=100)
    for kind in ("gaussian", "truncated_gaussian", "ou", "parameter_noise"):
        assert (acted(exploring(ended, kind=kind, sigma=sigma), policy(), 2) == 0).all()
