"""Advantages against the definition, summed forward step by step in NumPy: A_t = Σ (γλ)^k δ_{t+k} inside an episode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_node.algorithms.gae import advantages

Array = np.ndarray[Any, Any]


@dataclass
class Case:
    """The columns that advantages are computed from, in float64 so that only real differences show."""

    reward: Array
    value: Array
    bootstrap_value: Array
    terminated: Array
    truncated: Array
    mask: Array
    final_value: dict[tuple[int, int], float]
    gamma: float = 0.9
    gae_lambda: float = 0.8

    def found(self) -> Array:
        index = np.array(sorted(self.final_value), np.int64).reshape(-1, 2)
        names = ("reward", "value", "bootstrap_value", "terminated", "truncated", "mask")
        result = advantages(
            **{name: torch.from_numpy(getattr(self, name)) for name in names},
            final_index=torch.from_numpy(index),
            final_value=torch.tensor([self.final_value[(int(t), int(s))] for t, s in index], dtype=torch.float64),
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
        )
        return np.asarray(result.numpy())

    def expected(self) -> Array:
        steps, slots = self.reward.shape
        return np.array([[self._looking_forward(t, s) for s in range(slots)] for t in range(steps)])

    def _looking_forward(self, start: int, slot: int) -> float:
        total, weight = 0.0, 1.0
        for step in range(start, len(self.reward)):
            if not self.mask[step, slot]:
                break
            total += weight * self._delta(step, slot)
            if self.terminated[step, slot] or self.truncated[step, slot]:
                break
            weight *= self.gamma * self.gae_lambda
        return total

    def _delta(self, step: int, slot: int) -> float:
        if self.terminated[step, slot]:
            after = 0.0
        elif self.truncated[step, slot]:
            after = self.final_value[(step, slot)]
        elif step + 1 < len(self.value):
            after = self.value[step + 1, slot]
        else:
            after = self.bootstrap_value[slot]
        return float(self.reward[step, slot] + self.gamma * after - self.value[step, slot])


def random_case(seed: int, steps: int, slots: int, ends: float = 0.3, absent: float = 0.2) -> Case:
    random = np.random.default_rng(seed)
    mask = random.random((steps, slots)) >= absent
    terminated = (random.random((steps, slots)) < ends) & mask
    truncated = (random.random((steps, slots)) < ends) & mask
    values = random.normal(size=(3, steps, slots)) * 5
    final = {(int(t), int(s)): float(values[2, t, s]) for t, s in np.argwhere(truncated | terminated)}
    return Case(
        values[0], values[1], random.normal(size=slots), terminated, truncated, mask, final,
        float(random.choice([0.0, 0.9, 1.0])), float(random.choice([0.0, 0.95, 1.0])),
    )  # fmt: skip


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), steps=st.integers(1, 12), slots=st.integers(1, 4))
def test_advantages_are_the_discounted_sum_of_deltas(seed: int, steps: int, slots: int) -> None:
    case = random_case(seed, steps, slots)
    np.testing.assert_allclose(case.found(), case.expected(), rtol=1e-10, atol=1e-10)


def three_steps() -> Case:
    """Reward 1, values 10, 20, 30, then 40: δ without an end is 1 + 0.9·next − value."""
    column = np.array([[10.0], [20.0], [30.0]])
    terminated, truncated, mask = np.zeros((3, 1), np.bool_), np.zeros((3, 1), np.bool_), np.ones((3, 1), np.bool_)
    return Case(np.ones((3, 1)), column, np.array([40.0]), terminated, truncated, mask, {}, 0.9, 0.5)


def test_an_open_end_takes_the_value_after_the_last_step() -> None:
    deltas = [1 + 18 - 10, 1 + 27 - 20, 1 + 36 - 30]
    last, middle = deltas[2], deltas[1] + 0.45 * deltas[2]
    assert three_steps().found().flatten().tolist() == pytest.approx([deltas[0] + 0.45 * middle, middle, last])


def test_nothing_is_worth_anything_after_termination() -> None:
    case = three_steps()
    case.terminated[1, 0] = True
    assert case.found().flatten().tolist() == pytest.approx([9 + 0.45 * (1 - 20), 1 - 20, 7])


def test_a_truncated_step_is_followed_by_the_value_of_its_true_last_observation() -> None:
    case = three_steps()
    case.truncated[1, 0] = True
    case.final_value[(1, 0)] = 100.0
    assert case.found().flatten().tolist() == pytest.approx([9 + 0.45 * (1 + 90 - 20), 1 + 90 - 20, 7])


def test_termination_prevails_where_both_are_told() -> None:
    case = three_steps()
    case.terminated[1, 0] = case.truncated[1, 0] = True
    case.final_value[(1, 0)] = 100.0
    assert case.found()[1, 0] == pytest.approx(1 - 20)


def test_the_row_in_which_an_environment_resets_itself_counts_nothing() -> None:
    case = three_steps()
    case.terminated[0, 0] = True
    case.mask[1, 0] = False
    case.reward[1, 0] = 1e9
    assert case.found().flatten().tolist() == pytest.approx([1 - 10, 0.0, 7])


def test_slots_do_not_mix() -> None:
    case = random_case(5, steps=8, slots=3)
    changed = random_case(5, steps=8, slots=3)
    changed.reward[:, 1] += 1000.0
    before, after = case.found(), changed.found()
    assert np.array_equal(before[:, [0, 2]], after[:, [0, 2]]) and not np.array_equal(before[:, 1], after[:, 1])


def test_the_values_handed_in_are_left_as_they_were() -> None:
    case = random_case(6, steps=5, slots=2)
    kept = {name: np.array(getattr(case, name)) for name in ("reward", "value", "bootstrap_value")}
    case.found()
    assert all(np.array_equal(getattr(case, name), array) for name, array in kept.items())
