"""Explorations by noise on actions and on weights."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from stagecoach.rollout_worker.exploration.base import Exploration, RandomActing
from stagecoach.rollout_worker.exploration.noise import TruncatedGaussianNoise
from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.experience.spaces import Array
from stagecoach.shared.policies.policy import Policy
from stagecoach.shared.policies.serialization import state_arrays
from tests.support.experience.exploration import HIGH, LOW, NOISES, ROWS, alike, exploring, observations, policy_for
from tests.support.experience.policies import generator


@torch.no_grad()
def acted(exploration: Exploration, acting: Policy, steps: int, seed: int = 0, rows: int = ROWS) -> Array:
    """`[steps, rows, 2]`: how far the actions are from the best one, in halves of the range."""
    draw, sight = generator(seed), {"obs": torch.zeros(rows, 3)}
    best = acting.distribution.mode(acting.action_parameters(sight))["action"].numpy()
    taken = []
    for _ in range(steps):
        actions, params = exploration.act(acting, sight, draw)
        assert params is not None
        assert exploration.log_prob(acting, params, actions).isnan().all() or isinstance(
            exploration, TruncatedGaussianNoise
        )
        taken.append((actions["action"].numpy() - best) / ((HIGH - LOW) / 2))
        assert (actions["action"].numpy() >= LOW).all() and (actions["action"].numpy() <= HIGH).all()
    return np.stack(taken)


def test_gaussian_noise_is_scaled_and_independent() -> None:
    noise = acted(exploring(kind="gaussian", sigma=0.2), policy_for(), 2)
    np.testing.assert_allclose(noise.std(axis=1), 0.2, rtol=0.06)
    assert abs(np.corrcoef(noise[0, :, 0], noise[1, :, 0])[0, 1]) < 0.06
    bounded = acted(exploring(kind="gaussian", sigma=0.2, bound=1.5), policy_for(), 1)
    assert np.abs(bounded).max() == pytest.approx(0.3, abs=1e-5)


@pytest.mark.parametrize(("sigma", "outputs"), [(0.1, 0.0), (0.5, 1.0), (0.5, -9.0), (3.0, 0.4)])
@torch.no_grad()
def test_truncated_gaussian_matches_density(sigma: float, outputs: float) -> None:
    acting = policy_for()
    acting.get_parameter("head.weight").zero_()
    acting.get_parameter("head.bias").fill_(outputs)
    middle, exploration = math.tanh(outputs), exploring(kind="truncated_gaussian", sigma=sigma)
    sight = {"obs": torch.zeros(ROWS, 3)}
    actions, params = exploration.act(acting, sight, generator())
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
def test_truncated_gaussian_without_sigma_is_greedy() -> None:
    acting, sight = policy_for(), observations(50)
    still = exploring(kind="truncated_gaussian", sigma=0.0)
    actions, params = still.act(acting, sight, generator())
    assert params is not None and still.log_prob(acting, params, actions).isnan().all()
    assert torch.equal(actions["action"], acting.distribution.mode(params)["action"])
    drawing = policy_for(algorithm="sac")
    noisy = exploring(kind="truncated_gaussian", sigma=0.3)
    actions, params = noisy.act(drawing, sight, generator())
    assert params is not None and noisy.log_prob(drawing, params, actions).isnan().all()
    assert (actions["action"].numpy() >= LOW).all() and (actions["action"].numpy() <= HIGH).all()


def test_ou_noise_is_stationary_and_correlated() -> None:
    noise = acted(exploring(kind="ou", sigma=0.1, theta=0.2), policy_for(), 12)
    np.testing.assert_allclose(noise.std(axis=1), 0.1 / math.sqrt(1 - 0.8**2), rtol=0.06)
    for lag in (1, 5):
        found = np.corrcoef(noise[0, :, 1], noise[lag, :, 1])[0, 1]
        assert found == pytest.approx(0.8**lag, abs=0.06), f"after {lag} steps"


@pytest.mark.parametrize("kind", [*(kind for kind in NOISES if kind != "parameter_noise"), "sampling", "random"])
def test_noise_follows_generator_only(kind: str) -> None:
    def actions(seed: int) -> list[Any]:
        torch.manual_seed(99 + seed)
        exploration, draw = RandomActing() if kind == "random" else exploring(kind=kind), generator(seed // 2)
        return [exploration.act(acting, observations(5), draw)[0]["action"].tolist() for _ in range(3)]

    acting = policy_for(algorithm="" if kind in NOISES else "sac")
    assert actions(0) == actions(1) != actions(2)


def test_parameter_noise_leaves_policy_unchanged() -> None:
    acting = policy_for()
    before, exploration = state_arrays(acting), exploring(kind="parameter_noise", sigma=0.1)
    noise = acted(exploration, acting, 3, rows=6)
    np.testing.assert_allclose(noise, np.broadcast_to(noise[0, 0], noise.shape), atol=1e-6)
    assert (np.abs(noise) > 1e-4).all(), "equal observations, equal actions, other than the best"
    assert all(np.array_equal(array, before[name]) for name, array in state_arrays(acting).items())
    assert (acted(exploring(kind="parameter_noise", sigma=0.0), acting, 1) == 0).all()


@torch.no_grad()
def test_parameter_noise_follows_episode_seeds() -> None:
    """Slots of environment 0 and 1 take turns; whichever generator acts."""
    acting, sight = policy_for(), alike(4)

    def actions(*seeds: int) -> Array:
        exploration = exploring(kind="parameter_noise", sigma=0.1)
        for environment, seed in enumerate(seeds):
            exploration.begin(environment, seed)
        return exploration.act(acting, sight, generator(sum(seeds)))[0]["action"].numpy()

    one, other = actions(5, 6), actions(5, 7)
    assert np.array_equal(one[0::2], other[0::2]) and not np.array_equal(one[1::2], other[1::2])
    assert np.array_equal(one[0], one[2]) and not np.array_equal(one[0], one[1])


def test_noise_schedule_follows_counters() -> None:
    sigma = {"kind": "linear", "start": 0.3, "end": 0.0, "over": "100 env_steps"}
    ended = Counters(env_steps=100)
    for kind in NOISES:
        assert (acted(exploring(ended, kind=kind, sigma=sigma), policy_for(), 2) == 0).all()
