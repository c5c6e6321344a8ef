"""Rewards less their moving average: against the sum written out, as it is learnt from, and after a death."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shared.errors import ConfigError
from shared.spaces import Array
from shared.steps import Counters
from tests.conftest import minimal_config
from tests.trainer_node.game import NewGame, small
from tests.trainer_node.memories.streams import PLAIN, Stream, fill, known, numbers
from tests.trainer_node.test_dqn import fragments, make_dqn
from tests.trainer_node.test_reward_scaling import random_columns
from trainer_node.algorithms.off_policy import Minibatch
from trainer_node.memories.replay import ReplayMemory
from trainer_node.reward_average import RewardAverage

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


def test_rewards_lose_their_average_so_far_and_nothing_else_changes() -> None:
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


def test_before_the_first_fragment_and_without_an_actor_nothing_moves() -> None:
    filtered, absent = RewardAverage(ALPHA), random_columns(5)
    absent["mask"][:] = False
    assert np.array_equal(filtered.scale("w:0", absent)["reward"], absent["reward"])
    assert filtered.scaled(np.array([2.5], np.float32)).tolist() == [2.5]
    filtered.take_in("w:0", random_columns(0))
    before = filtered.state()
    filtered.take_in("w:0", absent)
    assert np.array_equal(before["average"], filtered.state()["average"])


@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_restored_one_goes_on_with_the_same_bits(at: int) -> None:
    whole, restored = RewardAverage(ALPHA), RewardAverage(ALPHA)
    for seed in range(at):
        whole.take_in("w:0", random_columns(seed))
    restored.load_state(whole.state())
    for seed in range(at, 6):
        one, other = (filtered.scale("w:0", random_columns(seed))["reward"] for filtered in (whole, restored))
        assert np.array_equal(one, other)


@pytest.mark.parametrize("n", [1, 3])
def test_from_a_memory_every_step_of_a_return_loses_the_average_as_it_is_now(n: int) -> None:
    stream, filtered, gamma = Stream(1, PLAIN, 5, 3), RewardAverage(ALPHA), 0.9
    memory = ReplayMemory(PLAIN, 5, 3, 60)
    items = stream.fragments(4)
    fill(memory, [(item.source, item.columns) for item in items])
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


def test_an_algorithm_with_a_memory_learns_from_rewards_above_the_average(monkeypatch: pytest.MonkeyPatch) -> None:
    filtered = RewardAverage(ALPHA)
    dqn = make_dqn(rewards=filtered)
    (item,) = fragments(1)
    filtered.take_in("w:0", item.columns)
    seen: list[Array] = []
    learn = dqn.learn

    def noted(batch: Minibatch, *rest: Any) -> Any:
        seen.append(batch.reward.numpy())
        return learn(batch, *rest)

    monkeypatch.setattr(dqn, "learn", noted)
    dqn.update([item], Counters(env_steps=20))
    there = filtered.scaled(item.columns["reward"][item.columns["mask"]])
    assert len(seen) == 20 and all(np.isin(rewards, there).all() for rewards in seen)


MEMORY = {"kind": "uniform", "capacity": 5 * 32}
LEARNING: list[dict[str, Any]] = [
    {"algorithm": {"name": "ppo", "minibatch_size": 32}},
    {"algorithm": {"name": "dqn", "minibatch_size": 16, "n_step": 3, "memory": MEMORY,
                   "gradient_steps_per_env_step": 0.1}},
]  # fmt: skip


@pytest.mark.parametrize("sections", LEARNING, ids=["ppo", "dqn"])
def test_a_run_that_dies_goes_on_exactly(new_game: NewGame, sections: dict[str, Any]) -> None:
    policy = {"hidden_sizes": [8], "reward_ewma": 0.1}
    config = small(policies={"default": policy}, **sections)
    whole = new_game(config).finish()
    game = new_game(config)
    game.lose_at((2, 5))
    assert game.finish() == whole
    without = small(policies={"default": policy | {"reward_ewma": None}}, **sections)
    assert new_game(without).finish() != whole, "the average changes what is learnt"


def test_two_ways_to_normalise_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"reward_ewma=0.1 with normalise_rewards=true.*use one"):
        minimal_config(policies={"default": {"reward_ewma": 0.1, "normalise_rewards": True}})
