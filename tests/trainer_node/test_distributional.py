"""Losses for distributions against slow loops, atom by atom and quantile by quantile."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from shared.spaces import Array
from trainer_node.algorithms.distributional import cross_entropy, divergence, project, quantile_huber


def shares(random: np.random.Generator, rows: int, atoms: int) -> Array:
    return random.dirichlet(np.ones(atoms), size=rows).astype(np.float32)


def algorithm_1(probabilities: Array, reward: float, discount: float, v_min: float, v_max: float) -> Array:
    """Bellemare et al. 2017, as it is printed (with the two shares where b is whole)."""
    count = len(probabilities)
    spacing = (v_max - v_min) / (count - 1)
    m = np.zeros(count)
    for j in range(count):
        moved = min(max(reward + discount * (v_min + j * spacing), v_min), v_max)
        b = (moved - v_min) / spacing
        low, high = math.floor(b), math.ceil(b)
        if low == high:
            m[low] += probabilities[j]
        else:
            m[low] += probabilities[j] * (high - b)
            m[high] += probabilities[j] * (b - low)
    return m


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("atoms", "v_min", "v_max"), [(2, -1.0, 1.0), (51, -10.0, 10.0), (7, 0.0, 3.0)])
def test_the_projection_is_algorithm_1(seed: int, atoms: int, v_min: float, v_max: float) -> None:
    random = np.random.default_rng(seed)
    probabilities = shares(random, 40, atoms)
    reward = random.normal(scale=(v_max - v_min) / 2, size=40).astype(np.float32)
    reward[:5] = 0.0
    discount = random.choice(np.array([0.0, 0.9, 1.0], np.float32), size=40)
    support = torch.linspace(v_min, v_max, atoms)
    of_rows = torch.from_numpy(reward), torch.from_numpy(discount)
    found = project(torch.from_numpy(probabilities), *of_rows, support).numpy()
    for row in range(40):
        expected = algorithm_1(probabilities[row], float(reward[row]), float(discount[row]), v_min, v_max)
        np.testing.assert_allclose(found[row], expected, atol=2e-5)
    np.testing.assert_allclose(found.sum(axis=1), 1, atol=2e-5)


def test_what_moves_by_whole_atoms_is_shifted_and_what_leaves_the_support_gathers_at_its_end() -> None:
    support, share = torch.linspace(-1.0, 1.0, 5), torch.tensor([[0.1, 0.2, 0.3, 0.2, 0.2]])
    one = torch.ones(1)
    torch.testing.assert_close(project(share, one * 0.5, one, support), torch.tensor([[0.0, 0.1, 0.2, 0.3, 0.4]]))
    torch.testing.assert_close(project(share, one * 9.0, one, support), torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0]]))
    torch.testing.assert_close(project(share, one * 0.0, one * 0, support), torch.tensor([[0.0, 0.0, 1.0, 0.0, 0.0]]))


def test_cross_entropy_and_divergence_are_their_sums() -> None:
    random = np.random.default_rng(4)
    logits, target = random.normal(size=(6, 5)).astype(np.float32), shares(random, 6, 5)
    target[0] = [0, 1, 0, 0, 0]
    found = cross_entropy(torch.from_numpy(logits), torch.from_numpy(target))
    apart = divergence(torch.from_numpy(logits), torch.from_numpy(target))
    for row in range(6):
        p = np.exp(logits[row].astype(np.float64)) / np.exp(logits[row].astype(np.float64)).sum()
        crossed = -sum(t * math.log(q) for t, q in zip(target[row], p))
        own = -sum(t * math.log(t) for t in target[row] if t > 0)
        assert float(found[row]) == pytest.approx(crossed, abs=1e-5)
        assert float(apart[row]) == pytest.approx(crossed - own, abs=1e-5)
    same = torch.from_numpy(logits)
    assert divergence(same, same.softmax(dim=1)).abs().max() < 1e-6
    assert (divergence(same, same.softmax(dim=1)) >= 0).all()


@pytest.mark.parametrize(("count", "targets"), [(1, 1), (5, 5), (4, 7)])
def test_the_quantile_loss_is_its_double_sum(count: int, targets: int) -> None:
    random = np.random.default_rng(count)
    quantiles, target = random.normal(size=(6, count)) * 2, random.normal(size=(6, targets)) * 2
    found = quantile_huber(torch.from_numpy(quantiles), torch.from_numpy(target)).numpy()
    for row in range(6):
        total = 0.0
        for i in range(count):
            tau = (2 * i + 1) / (2 * count)
            for j in range(targets):
                u = target[row, j] - quantiles[row, i]
                huber = u * u / 2 if abs(u) <= 1 else abs(u) - 0.5
                total += abs(tau - (1.0 if u < 0 else 0.0)) * huber / targets
        assert found[row] == pytest.approx(total, abs=1e-6)


def test_the_quantile_loss_finds_quantiles() -> None:
    """Descended on a large sample it comes to where that share of it lies below."""
    target = torch.randn(1, 4000, generator=torch.Generator().manual_seed(0)) * 20
    quantiles = torch.zeros(1, 4, requires_grad=True)
    for _ in range(400):
        (gradient,) = torch.autograd.grad(quantile_huber(quantiles, target).sum(), quantiles)
        quantiles = (quantiles - 10 * gradient).detach().requires_grad_()
    below = (target < quantiles.detach()[0].unsqueeze(1)).float().mean(dim=1)
    torch.testing.assert_close(below, torch.tensor([0.125, 0.375, 0.625, 0.875]), atol=0.02, rtol=0)


@pytest.mark.parametrize("loss", [cross_entropy, quantile_huber])
def test_gradients_are_those_of_finite_differences(loss: object) -> None:
    assert callable(loss)
    random = np.random.default_rng(1)
    target = torch.from_numpy(shares(random, 3, 5).astype(np.float64))
    given = torch.from_numpy(random.normal(size=(3, 5))).requires_grad_()
    assert torch.autograd.gradcheck(lambda values: loss(values, target), (given,))
