"""Rewards divided by the deviation of all discounted returns, or less their moving average: against slow sums."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.experience.spaces import Array, Columns
from stagecoach.trainer_node.learning.building_blocks.reward_normalization import (
    RewardAverage,
    RewardFilter,
    RewardScaling,
)
from stagecoach.trainer_node.learning.replay_buffers.uniform import ReplayBuffer
from tests.support.learning.algorithms import make_dqn, noted
from tests.support.learning.streams import PLAIN, Stream, fill, known, numbers, streamed

GAMMA = 0.9


def random_columns(seed: int, steps: int = 6, slots: int = 3) -> Columns:
    """Rows after the end of an episode may be masked, as an environment's own reset step is, and where agents act in
    turns the last ones are empty."""
    random = np.random.default_rng(seed)
    over = random.random((steps, slots)) < 0.3
    mask = np.ones((steps, slots), np.bool_)
    mask[1:] &= ~(over[:-1] & (random.random((steps - 1, slots)) < 0.5))
    mask[steps - seed % 3 :, 0] = False
    terminated = over & mask & (random.random((steps, slots)) < 0.5)
    reward = np.where(mask, random.normal(size=(steps, slots)) * 4 + 1, 0).astype(np.float32)
    return {"reward": reward, "terminated": terminated, "truncated": over & mask & ~terminated, "mask": mask}


def test_scaling_in_turns_restarts_returns_at_each_fragment() -> None:
    none = np.zeros((2, 1), np.bool_)
    columns = {"reward": np.ones((2, 1), np.float32), "terminated": none, "truncated": none, "mask": ~none}
    for in_turns, mean in ((True, 1.5), (False, 2.5)):
        scaling = RewardScaling(1.0, in_turns)
        for _ in range(2):
            scaling.take_in("worker-0:0.0", columns)
        assert scaling.state()["moments"][1] == mean


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
                if columns["mask"][step, slot]:
                    total = GAMMA * total + float(columns["reward"][step, slot])
                    self.returns.append(total)
                if columns["terminated"][step, slot] or columns["truncated"][step, slot]:
                    total = 0.0
            self.running[(source, slot)] = total
        scaled: Array = np.clip(columns["reward"] / np.sqrt(np.var(self.returns) + 1e-8), -10, 10)
        return scaled


@settings(max_examples=40, derandomize=True)
@given(
    order=st.lists(
        st.tuples(st.sampled_from(["worker-0:0", "worker-1:0"]), st.integers(0, 999)), min_size=1, max_size=6
    )
)
def test_scaling_divides_by_deviation_of_discounted_return(order: list[tuple[str, int]]) -> None:
    scaling, collector = RewardScaling(GAMMA), Collector()
    for source, seed in order:
        columns = random_columns(seed)
        kept = columns["reward"].copy()
        found = scaling.scale(source, columns)
        np.testing.assert_allclose(found["reward"], collector.expected(source, columns), rtol=1e-4, atol=1e-5)
        assert found["reward"].dtype == np.float32 and np.array_equal(columns["reward"], kept), "not in place"
        assert all(found[name] is columns[name] for name in ("terminated", "truncated", "mask"))


def test_scaling_restarts_returns_at_a_new_incarnation() -> None:
    scaling = RewardScaling(GAMMA)
    scaling.scale("worker-0:0", random_columns(1))
    scaling.scale("worker-1:0", random_columns(2))
    scaling.scale("worker-0:1", random_columns(3))
    assert set(scaling.state()) == {"moments", "running/worker-0:1", "running/worker-1:0"}
    columns = random_columns(3)
    fresh = RewardScaling(GAMMA)
    fresh.scale("worker-9:0", columns)
    assert np.array_equal(scaling.state()["running/worker-0:1"], fresh.state()["running/worker-9:0"])


def test_rewards_of_zero_stay_zero_and_outliers_are_bounded() -> None:
    for mask in (True, False):
        columns = random_columns(4)
        columns["reward"][:], columns["mask"][:] = 0, mask
        assert not RewardScaling(GAMMA).scale("w:0", columns)["reward"].any()
    columns = random_columns(4, steps=400)
    columns["reward"][5, 0] = 1e6
    columns["mask"][:] = True
    assert np.abs(RewardScaling(GAMMA).scale("w:0", columns)["reward"]).max() == pytest.approx(10.0)


# Less their moving average

ALPHA = 0.2


def averages(seeds: list[int]) -> list[float]:
    """After each fragment: Σ α (1 − α)^age · its average, and the first one's instead of the rest."""
    means = []
    for seed in seeds:
        columns = random_columns(seed)
        means.append(float(np.mean([float(reward) for reward in columns["reward"][columns["mask"]]])))
    found = []
    for end in range(len(means)):
        weights = [ALPHA * (1 - ALPHA) ** (end - place) for place in range(1, end + 1)]
        found.append(sum(w * mean for w, mean in zip(weights, means[1:])) + (1 - ALPHA) ** end * means[0])
    return found


def test_average_is_subtracted_from_rewards_alone() -> None:
    filtered, seeds = RewardAverage(ALPHA), list(range(6))
    for seed, average in zip(seeds, averages(seeds), strict=True):
        columns = random_columns(seed)
        kept = {name: array.copy() for name, array in columns.items()}
        found = filtered.scale("w:0", columns)
        expected = np.where(columns["mask"], columns["reward"] - average, columns["reward"])
        np.testing.assert_allclose(found["reward"], expected, rtol=1e-5, atol=1e-5)
        assert found["reward"].dtype == np.float32
        assert all(np.array_equal(columns[name], array) for name, array in kept.items())
        assert all(found[name] is columns[name] for name in kept.keys() - {"reward"})


def test_average_is_unchanged_without_actors() -> None:
    filtered, absent = RewardAverage(ALPHA), random_columns(5)
    absent["mask"][:] = False
    assert np.array_equal(filtered.scale("w:0", absent)["reward"], absent["reward"])
    assert filtered.scaled(np.array([2.5], np.float32)).tolist() == [2.5]
    filtered.take_in("w:0", random_columns(0))
    before = filtered.state()
    filtered.take_in("w:0", absent)
    assert np.array_equal(before["average"], filtered.state()["average"])


@pytest.mark.parametrize("n", [1, 3])
def test_replayed_return_loses_current_average_at_each_step(n: int) -> None:
    stream, filtered, gamma = Stream(1, PLAIN, 5, 3), RewardAverage(ALPHA), 0.9
    memory = ReplayBuffer(PLAIN, 5, 3, 60)
    items = stream.fragments(4)
    fill(memory, items)
    for item in items:
        filtered.take_in(item.source, item.columns)
    (average,) = filtered.state()["average"].tolist()
    truth = known(stream.made[-4:], stream.made)
    batch = memory.sample(300, np.random.default_rng(0), gamma=gamma, n_step=n, as_now=filtered.scaled)
    lengths = set()
    for row, number in enumerate(numbers(batch.observations)):
        step, total, length = truth[int(number)], 0.0, 0
        for power in range(n):
            total, length = total + gamma**power * (step.reward - average), length + 1
            if step.terminated or step.truncated or step.after is None or step.after.number not in truth:
                break
            step = step.after
        lengths.add(length)
        assert batch.reward[row] == pytest.approx(total, abs=1e-5)
    assert len(lengths) == n


@pytest.mark.parametrize("rewards", [RewardScaling(0.99), RewardAverage(ALPHA)], ids=["scaled", "less the average"])
def test_replayed_rewards_are_normalized_when_drawn(rewards: RewardFilter, monkeypatch: pytest.MonkeyPatch) -> None:
    dqn, (item,) = make_dqn(rewards=rewards), streamed(1)
    rewards.take_in("w:0", item.columns)
    learned = noted(monkeypatch, dqn, "learn")
    dqn.update([item], Counters(env_steps=20))
    seen = [batch.reward.numpy() for batch, *_ in learned]
    there = item.columns["reward"][item.columns["mask"]]
    assert len(seen) == 20 and all(np.isin(found, rewards.scaled(there)).all() for found in seen)
    assert not np.isin(seen[0], there).any()
