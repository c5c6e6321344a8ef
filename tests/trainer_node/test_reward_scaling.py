"""Reward normalisation against the deviation of all discounted returns, collected one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.spaces import Array, Columns
from trainer_node.reward_scaling import RewardScaling

GAMMA = 0.9


def random_columns(seed: int, steps: int = 6, slots: int = 3) -> Columns:
    """Rows after the end of an episode may be masked, as an environment's own reset step is."""
    random = np.random.default_rng(seed)
    over = random.random((steps, slots)) < 0.3
    mask = np.ones((steps, slots), np.bool_)
    mask[1:] &= ~(over[:-1] & (random.random((steps - 1, slots)) < 0.5))
    terminated = over & mask & (random.random((steps, slots)) < 0.5)
    reward = np.where(mask, random.normal(size=(steps, slots)) * 4 + 1, 0).astype(np.float32)
    return {"reward": reward, "terminated": terminated, "truncated": over & mask & ~terminated, "mask": mask}


class Collector:
    """Every discounted return of every slot, kept in a list."""

    def __init__(self) -> None:
        self.returns: list[float] = []
        self.running: dict[tuple[str, int], float] = {}

    def expected(self, source: str, columns: Columns) -> Array:
        steps, slots = columns["reward"].shape
        for slot in range(slots):
            total = self.running.get((source, slot), 0.0)
            for step in range(steps):
                total = GAMMA * total + float(columns["reward"][step, slot])
                if columns["mask"][step, slot]:
                    self.returns.append(total)
                if columns["terminated"][step, slot] or columns["truncated"][step, slot]:
                    total = 0.0
            self.running[(source, slot)] = total
        scaled: Array = np.clip(columns["reward"] / np.sqrt(np.var(self.returns) + 1e-8), -10, 10)
        return scaled


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    order=st.lists(
        st.tuples(st.sampled_from(["worker-0:0", "worker-1:0"]), st.integers(0, 999)), min_size=1, max_size=6
    )
)
def test_rewards_are_divided_by_the_deviation_of_the_discounted_return(order: list[tuple[str, int]]) -> None:
    scaling, collector = RewardScaling(GAMMA), Collector()
    for source, seed in order:
        columns = random_columns(seed)
        np.testing.assert_allclose(
            scaling.scale(source, columns)["reward"], collector.expected(source, columns), rtol=1e-4, atol=1e-5
        )


def test_only_the_rewards_change_and_not_in_place() -> None:
    columns = random_columns(1)
    kept = columns["reward"].copy()
    scaled = RewardScaling(GAMMA).scale("worker-0:0", columns)
    assert np.array_equal(columns["reward"], kept) and not np.array_equal(scaled["reward"], kept)
    assert scaled["reward"].dtype == np.float32
    assert all(scaled[name] is columns[name] for name in ("terminated", "truncated", "mask"))


def test_a_new_incarnation_starts_its_returns_anew_and_its_elder_is_forgotten() -> None:
    scaling = RewardScaling(GAMMA)
    scaling.scale("worker-0:0", random_columns(1))
    scaling.scale("worker-1:0", random_columns(2))
    scaling.scale("worker-0:1", random_columns(3))
    assert set(scaling.state()) == {"moments", "running/worker-0:1", "running/worker-1:0"}
    columns = random_columns(3)
    fresh = RewardScaling(GAMMA)
    fresh.scale("worker-9:0", columns)
    assert np.array_equal(scaling.state()["running/worker-0:1"], fresh.state()["running/worker-9:0"])


def test_a_restored_scaling_goes_on_with_the_same_bits() -> None:
    def run(scaling: RewardScaling, seeds: list[int]) -> list[Any]:
        return [scaling.scale(f"worker-{seed % 2}:0", random_columns(seed))["reward"].tobytes() for seed in seeds]

    whole = run(RewardScaling(GAMMA), [1, 2, 3, 4, 5])
    first = RewardScaling(GAMMA)
    run(first, [1, 2])
    state = first.state()
    restored = RewardScaling(GAMMA)
    restored.load_state(state)
    assert run(restored, [3, 4, 5]) == whole[2:]


def test_rewards_of_zero_stay_zero_and_outliers_are_bounded() -> None:
    columns = random_columns(4)
    columns["reward"][:] = 0
    assert not RewardScaling(GAMMA).scale("w:0", columns)["reward"].any()
    columns = random_columns(4, steps=400)
    columns["reward"][5, 0] = 1e6
    columns["mask"][:] = True
    assert np.abs(RewardScaling(GAMMA).scale("w:0", columns)["reward"]).max() == pytest.approx(10.0)


def test_a_fragment_without_a_single_actor_is_harmless() -> None:
    columns = random_columns(5)
    columns["mask"][:] = False
    columns["reward"][:] = 0
    assert np.isfinite(RewardScaling(GAMMA).scale("w:0", columns)["reward"]).all()
