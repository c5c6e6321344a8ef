"""V-trace against its definition, summed forward step by step in NumPy (Espeholt et al. 2018, eq. 1 and remark 2).

v_s = V_s + Σ_t γ^{t−s} (Π_{i<t} c_i) δ_t, with δ_t = ρ_t (r_t + γ V_{t+1} − V_t), inside one episode.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_node.algorithms.gae import advantages
from trainer_node.algorithms.vtrace import VTrace, vtrace

Array = np.ndarray[Any, Any]
_COLUMNS = ("log_ratio", "reward", "value", "bootstrap_value", "terminated", "truncated", "mask")


@dataclass
class Case:
    """The columns, in float64 so that only real differences show."""

    log_ratio: Array
    reward: Array
    value: Array
    bootstrap_value: Array
    terminated: Array
    truncated: Array
    mask: Array
    final_value: dict[tuple[int, int], float]
    gamma: float = 0.9
    vtrace_lambda: float = 1.0
    rho_bar: float = 1.0
    c_bar: float = 1.0

    def tensors(self) -> dict[str, torch.Tensor]:
        index = np.array(sorted(self.final_value), np.int64).reshape(-1, 2)
        final = [self.final_value[(int(t), int(s))] for t, s in index]
        columns = {name: torch.from_numpy(getattr(self, name)) for name in _COLUMNS}
        return columns | {
            "final_index": torch.from_numpy(index),
            "final_value": torch.tensor(final, dtype=torch.float64),
        }

    def found(self) -> VTrace:
        return vtrace(
            **self.tensors(), gamma=self.gamma, vtrace_lambda=self.vtrace_lambda, rho_bar=self.rho_bar,
            c_bar=self.c_bar,
        )  # fmt: skip

    def target(self, start: int, slot: int) -> float:
        total, product = self.value[start, slot], 1.0
        for step in range(start, len(self.reward)):
            if not self.mask[step, slot]:
                break
            weight = min(self.rho_bar, math.exp(self.log_ratio[step, slot]))
            after = self.value_after(step, slot, self.value)
            total += product * weight * (self.reward[step, slot] + self.gamma * after - self.value[step, slot])
            if self.terminated[step, slot] or self.truncated[step, slot]:
                break
            product *= self.gamma * self.vtrace_lambda * min(self.c_bar, math.exp(self.log_ratio[step, slot]))
        return float(total)

    def value_after(self, step: int, slot: int, inside: Array) -> float:
        if self.terminated[step, slot]:
            return 0.0
        if self.truncated[step, slot]:
            return self.final_value[(step, slot)]
        if step + 1 == len(inside):
            return float(self.bootstrap_value[slot])
        return float(inside[step + 1, slot])

    def expected(self) -> tuple[Array, Array, Array]:
        shape = self.reward.shape
        target = np.array([[self.target(t, s) for s in range(shape[1])] for t in range(shape[0])])
        advantage, weight = np.zeros(shape), np.zeros(shape)
        for step, slot in zip(*np.nonzero(self.mask), strict=True):
            after = self.value_after(step, slot, target)
            advantage[step, slot] = self.reward[step, slot] + self.gamma * after - self.value[step, slot]
            weight[step, slot] = min(self.rho_bar, math.exp(self.log_ratio[step, slot]))
        return target, advantage, weight


def random_case(seed: int, steps: int, slots: int, away: float = 1.0) -> Case:
    """`away`: how far the policy is from the one that acted."""
    random = np.random.default_rng(seed)
    mask = random.random((steps, slots)) >= 0.2
    terminated = (random.random((steps, slots)) < 0.2) & mask
    truncated = (random.random((steps, slots)) < 0.2) & mask
    values = random.normal(size=(4, steps, slots)) * 5
    final = {(int(t), int(s)): float(values[2, t, s]) for t, s in np.argwhere(truncated | terminated)}
    return Case(
        away * values[3] / 5, values[0], values[1], random.normal(size=slots), terminated, truncated, mask, final,
        gamma=float(random.choice([0.0, 0.9, 1.0])), vtrace_lambda=float(random.choice([0.0, 0.95, 1.0])),
        rho_bar=float(random.choice([0.5, 1.0, 3.0])), c_bar=float(random.choice([0.5, 1.0, 2.0])),
    )  # fmt: skip


@settings(max_examples=80, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), steps=st.integers(1, 12), slots=st.integers(1, 4))
def test_targets_advantages_and_weights_are_those_of_the_paper(seed: int, steps: int, slots: int) -> None:
    case = random_case(seed, steps, slots)
    for found, expected in zip(case.found(), case.expected(), strict=True):
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), steps=st.integers(1, 10), slots=st.integers(1, 3))
def test_on_policy_the_targets_are_the_returns_of_gae(seed: int, steps: int, slots: int) -> None:
    """Remark 1 of the paper: where who acted is who learns, v_s is the n-step return (λ = 1), or TD(λ)'s."""
    case = random_case(seed, steps, slots, away=0.0)
    case.rho_bar = case.c_bar = 1.0
    tensors = case.tensors()
    del tensors["log_ratio"]
    of_gae = advantages(**tensors, gamma=case.gamma, gae_lambda=case.vtrace_lambda)
    found = case.found()
    torch.testing.assert_close(found.target, torch.from_numpy(case.value) + of_gae, rtol=1e-9, atol=1e-9)
    if case.vtrace_lambda == 1.0:
        torch.testing.assert_close(found.weight * found.advantage, of_gae, rtol=1e-9, atol=1e-9)


def three_steps() -> Case:
    """Reward 1, values 10, 20, 30, then 40; ratios 2, ½ and 1 of which the first is cut to 1."""
    column = np.array([[10.0], [20.0], [30.0]])
    terminated, truncated, mask = np.zeros((3, 1), np.bool_), np.zeros((3, 1), np.bool_), np.ones((3, 1), np.bool_)
    ratios = np.log(np.array([[2.0], [0.5], [1.0]]))
    return Case(ratios, np.ones((3, 1)), column, np.array([40.0]), terminated, truncated, mask, {})


def test_by_hand() -> None:
    found = three_steps().found()
    last = 30 + (1 + 36 - 30)
    middle = 20 + 0.5 * (1 + 27 - 20) + 0.9 * 0.5 * (last - 30)
    first = 10 + (1 + 18 - 10) + 0.9 * (middle - 20)
    assert found.target.flatten().tolist() == pytest.approx([first, middle, last])
    expected = [1 + 0.9 * middle - 10, 1 + 0.9 * last - 20, 1 + 0.9 * 40 - 30]
    assert found.advantage.flatten().tolist() == pytest.approx(expected)
    assert found.weight.flatten().tolist() == pytest.approx([1.0, 0.5, 1.0])


def test_an_end_is_worth_nothing_and_a_limit_what_was_seen_last() -> None:
    ended, cut = three_steps(), three_steps()
    ended.terminated[1, 0] = cut.truncated[1, 0] = True
    cut.final_value[(1, 0)] = 100.0
    assert ended.found().advantage[1, 0].item() == pytest.approx(1 - 20)
    assert cut.found().advantage[1, 0].item() == pytest.approx(1 + 90 - 20)
    assert ended.found().target[2, 0] == cut.found().target[2, 0] == three_steps().found().target[2, 0]


def test_a_row_that_does_not_count_says_nothing_and_hears_nothing() -> None:
    case = three_steps()
    case.terminated[0, 0] = True
    case.mask[1, 0] = False
    case.reward[1, 0] = case.log_ratio[1, 0] = 1e9
    found = case.found()
    assert found.target.flatten().tolist() == pytest.approx([1.0, 20.0, 37.0])
    assert found.advantage[1, 0] == found.weight[1, 0] == 0


def test_slots_do_not_mix_and_nothing_handed_in_is_changed() -> None:
    case, changed = random_case(5, 8, 3), random_case(5, 8, 3)
    changed.reward[:, 1] += 1000.0
    kept = {name: np.array(getattr(case, name)) for name in _COLUMNS}
    before, after = case.found(), changed.found()
    assert torch.equal(before.target[:, [0, 2]], after.target[:, [0, 2]])
    assert not torch.equal(before.target[:, 1], after.target[:, 1])
    assert all(np.array_equal(getattr(case, name), array) for name, array in kept.items())
