"""Hindsight replay: goals, rewards and ends of relabeled transitions, against episodes walked step by step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.config.algorithms.replay_buffer import HindsightReplay as Section
from stagecoach.shared.experience.spaces import Array
from stagecoach.trainer_node.learning.algorithms.off_policy import make_replay_buffer
from stagecoach.trainer_node.learning.replay_buffers.hindsight import (
    ACHIEVED,
    DESIRED,
    HindsightReplayBuffer,
    Strategy,
    goal_reward,
    sparse,
)
from stagecoach.trainer_node.learning.replay_buffers.uniform import Batch
from tests.support.learning.algorithms import BOXES, CHOICE, make
from tests.support.learning.experience import minibatch
from tests.support.learning.streams import GOALS, PLAIN, Step, Stream, fill, known, n_steps, numbers

STRATEGIES: list[Strategy] = ["future", "final", "episode"]


def made_for_tests(achieved: Array, desired: Array) -> tuple[Array, Array]:
    """A reward that tells both goals and a termination that is neither rare nor the rule."""
    return achieved[:, 0] - 2 * desired[:, 1], achieved[:, 1] > desired[:, 0] + 0.5


def filled(
    stream: Stream, places: int, made: int, strategy: Strategy, fraction: float = 1.0
) -> tuple[HindsightReplayBuffer, dict[int, Step]]:
    memory = HindsightReplayBuffer(
        GOALS, stream.steps, stream.slots, places * stream.steps * stream.slots,
        strategy=strategy, relabeled_fraction=fraction, reward=made_for_tests,
    )  # fmt: skip
    fill(memory, stream.fragments(made))
    return memory, known(stream.made[-places:], stream.made)


def episode_of(step: Step, steps: dict[int, Step]) -> tuple[list[Step], int]:
    """All known steps of its episode, and which of them it is."""
    before = {item.after.number: item for item in steps.values() if item.after}
    first = step
    while first.number in before:
        first = before[first.number]
    episode = [first]
    while episode[-1].after:
        episode.append(episode[-1].after)
    return episode, next(place for place, item in enumerate(episode) if item is step)


def possible(step: Step, steps: dict[int, Step], strategy: Strategy) -> list[Step]:
    """After which steps a goal for this one may have been achieved; none where it cannot be relabeled."""
    if not step.led_to:
        return []
    episode, place = episode_of(step, steps)
    told = [item for item in episode if item.led_to]
    return {"future": told[place:], "final": told[-1:], "episode": told}[strategy]


def relabeled(step: Step, goal: Array, n: int, gamma: float) -> tuple[float, float, Step]:
    """Reward, discount and last step of up to `n` steps if this had been the goal."""
    total, factor = 0.0, 1.0
    while True:
        (reward,), (over,) = made_for_tests(step.led_to[ACHIEVED][None], goal[None])
        total += factor * float(reward)
        factor *= gamma
        n -= 1
        fallen = step.terminated and not made_for_tests(step.led_to[ACHIEVED][None], step.obs[DESIRED][None])[1][0]
        if over or fallen:
            return total, 0.0, step
        if not n or step.after is None or not step.after.led_to:
            return total, factor, step
        step = step.after


def check(batch: Batch, steps: dict[int, Step], n: int, strategy: Strategy, everything: bool) -> int:
    """Every row, with its own goal or with one that its episode achieved; how many were relabeled."""
    count = 0
    for row, number in enumerate(numbers(batch.observations)):
        step, goal = steps[int(number)], batch.observations[DESIRED][row]
        if np.array_equal(goal, step.obs[DESIRED]):
            assert not (everything and possible(step, steps, strategy))
            reward, discount, led_to = n_steps(step, n, 0.9)
        else:
            count += 1
            assert any(np.array_equal(goal, item.led_to[ACHIEVED]) for item in possible(step, steps, strategy))
            reward, discount, last = relabeled(step, goal, n, 0.9)
            led_to = last.led_to | {DESIRED: goal}
        assert batch.reward[row] == pytest.approx(reward, rel=1e-5, abs=1e-5)
        assert batch.discount[row] == pytest.approx(discount, rel=1e-6)
        assert batch.actions["action"][row] == step.action
        for name, array in batch.observations.items():
            assert name == DESIRED or np.array_equal(array[row], step.obs[name])
            assert not discount or led_to is None or np.array_equal(batch.next_observations[name][row], led_to[name])
    return count


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("n", [1, 4])
@settings(max_examples=40, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    steps=st.integers(1, 6),
    slots=st.integers(1, 3),
    places=st.integers(1, 6),
    made=st.integers(1, 12),
    ends=st.sampled_from([0.02, 0.15]),
)
def test_relabeled_transitions_are_what_they_would_have_been(
    n: int, strategy: Strategy, seed: int, steps: int, slots: int, places: int, made: int, ends: float
) -> None:
    stream = Stream(seed, GOALS, steps, slots)
    stream.ends = ends
    memory, truth = filled(stream, places, made, strategy)
    if truth:
        check(memory.sample(40, np.random.default_rng(seed), n_step=n, gamma=0.9), truth, n, strategy, True)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_goal_of_an_episode_is_as_probable(strategy: Strategy) -> None:
    stream = Stream(3, GOALS, 3, 1)
    stream.ends, stream.absent, stream.lost, stream.sources = 0.1, 0.0, 0.0, 1
    memory, truth = filled(stream, 6, 6, strategy)
    batch = memory.sample(40_000, np.random.default_rng(0), gamma=0.9)
    goals: dict[int, Counter[bytes]] = {number: Counter() for number in truth}
    for number, goal in zip(numbers(batch.observations).tolist(), batch.observations[DESIRED], strict=True):
        goals[number][goal.tobytes()] += 1
    lengths = set()
    for number, found in goals.items():
        expected = {item.led_to[ACHIEVED].tobytes() for item in possible(truth[number], truth, strategy)}
        lengths.add(len(expected))
        assert set(found) == (expected or {truth[number].obs[DESIRED].tobytes()})
        each = sum(found.values()) / max(1, len(expected))
        squares = sum((times - each) ** 2 / each for times in found.values())
        assert squares <= len(expected) + 6 * len(expected) ** 0.5
    assert strategy == "final" or max(lengths) > 3  # across fragments


@pytest.mark.parametrize("reached", [True, False], ids=["it reached its goal", "it fell"])
def test_final_state_of_terminated_episode_is_a_goal(reached: bool) -> None:
    """Three steps along a line, to 1, 2, 3: under the goal 2 it goes on from 3, unless it ended for another reason."""
    line = np.stack([np.arange(3), np.zeros(3)], axis=1).astype(np.float32)[:, None]
    desired = np.full((3, 1, 2), [3.0 if reached else 9.0, 0.0], np.float32)
    last, last_seen = np.array([[False], [False], [True]]), np.array([[3, 0]], np.float32)
    columns = {
        "obs.achieved_goal": line, "obs.desired_goal": desired, "obs.observation": line,
        "bootstrap_obs.achieved_goal": 7 + line[0], "bootstrap_obs.desired_goal": desired[0],
        "bootstrap_obs.observation": 7 + line[0], "final_obs.achieved_goal": last_seen,
        "final_obs.desired_goal": desired[2], "final_obs.observation": last_seen,
        "final_index": np.array([[2, 0]], np.int32), "action": np.zeros((3, 1), np.int64),
        "reward": np.zeros((3, 1), np.float32), "log_prob": np.zeros((3, 1), np.float32),
        "terminated": last, "truncated": np.zeros_like(last), "mask": np.ones_like(last),
    }  # fmt: skip
    section = Section(capacity=3, strategy="episode", relabeled_fraction=1.0, threshold=0.5, terminates=True)
    memory = make_replay_buffer(section, GOALS, 3, 1)
    memory.add("w0:0.0", columns)
    batch = memory.sample(300, np.random.default_rng(0), gamma=0.5)
    place, goal = batch.observations["obs.observation"][:, 0], batch.observations[DESIRED][:, 0]
    assert set(zip(place.tolist(), goal.tolist(), strict=True)) == {(p, g) for p in (0, 1, 2) for g in (1, 2, 3)}
    assert np.array_equal(batch.next_observations["obs.observation"][:, 0], place + 1), "also after termination"
    assert np.array_equal(batch.reward, np.where(goal == place + 1, 0, -1))
    ends = (goal == place + 1) | ((place == 2) & (not reached))
    assert np.array_equal(batch.discount, np.where(ends, 0, 0.5))


@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.8])
def test_configured_fraction_is_relabeled(fraction: float) -> None:
    stream = Stream(3, GOALS, 8, 2)
    memory, truth = filled(stream, 5, 5, "future", fraction)
    batch = memory.sample(8000, np.random.default_rng(0), gamma=0.9)
    able = sum(bool(possible(truth[int(number)], truth, "future")) for number in numbers(batch.observations))
    found = check(batch, truth, 1, "future", False)
    assert found == pytest.approx(fraction * able, abs=4 * (able * fraction * (1 - fraction)) ** 0.5)


def test_stored_transitions_keep_their_goal() -> None:
    memory, truth = filled(Stream(3, GOALS, 8, 2), 5, 5, "final")
    rows = np.arange(5 * 8 * 2)
    before = memory.ring.observations(rows)
    memory.sample(200, np.random.default_rng(0), gamma=0.9, n_step=3)
    after = memory.ring.observations(rows)
    assert all(np.array_equal(array, after[name]) for name, array in before.items())
    assert truth


@pytest.mark.parametrize("terminates", [False, True])
def test_sparse_reward_is_0_within_threshold(terminates: bool) -> None:
    achieved = np.array([[0, 0], [3, 4], [3, 4.1], [0, 0]], np.float32)
    desired = np.array([[0, 5], [0, 0], [0, 0], [0, 0]], np.float32)
    reward, terminated = sparse(5.0, terminates)(achieved, desired)
    assert reward.tolist() == [0, 0, -1, 0] and terminated.tolist() == [terminates, terminates, False, terminates]


def test_sparse_reward_compares_choices_and_bytes() -> None:
    bits = np.array([[0, 1, 1], [0, 0, 1]])
    assert sparse(0.05, True)(bits, bits[::-1])[0].tolist() == [-1, -1]
    dark, light = np.zeros((1, 2), np.uint8), np.ones((1, 2), np.uint8)
    assert sparse(1.5, True)(dark, light)[0].tolist() == [0]  # unsigned bytes would wrap around


@pytest.mark.parametrize("name", ["nowhere:reward", "json:nothing", "no-colon"])
def test_unimportable_reward_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"algorithm.replay_buffer.reward={name}.*module:function"):
        goal_reward(Section(reward=name))


def test_own_reward_is_imported() -> None:
    assert goal_reward(Section(reward="numpy:hypot")) is np.hypot


def test_reward_of_wrong_shape_is_refused() -> None:
    stream = Stream(3, GOALS, 4, 2)
    memory = HindsightReplayBuffer(
        GOALS, 4, 2, 40, strategy="future", relabeled_fraction=1.0, reward=lambda achieved, _: (achieved, achieved > 0)
    )
    fill(memory, stream.fragments(5))
    with pytest.raises(ValueError, match="goal reward returned"):
        memory.sample(8, np.random.default_rng(0), gamma=0.9)


def test_observations_without_goals_are_refused() -> None:
    with pytest.raises(ConfigError, match="achieved_goal and desired_goal"):
        make_replay_buffer(Section(), PLAIN, 4, 2)


def sparse_memory(rewards: list[float], **changes: Any) -> HindsightReplayBuffer:
    """A buffer of one fragment with these rewards, its own reward `sparse`."""
    stream = Stream(0, GOALS, steps=len(rewards), slots=1)
    made: dict[str, Any] = {
        "strategy": "future",
        "relabeled_fraction": 0.8,
        "reward": sparse(0.05, False),
        "bounded": True,
    }
    memory = HindsightReplayBuffer(GOALS, len(rewards), 1, 8 * len(rewards), **(made | changes))
    for item in stream.fragments(1):
        column = np.array(rewards, np.float32).reshape(-1, 1)
        memory.add(item.source, item.columns | {"reward": column, "info/subgoal_missed": np.zeros_like(column)})
    return memory


def test_values_are_bounded_while_rewards_are_minus_one_or_zero() -> None:
    assert sparse_memory([-1, 0, -1]).value_bounds(0.9) == pytest.approx((-10, 0))
    assert sparse_memory([-1, 0, -1], missed_penalty=25.0).value_bounds(0.9) == (-25, 0)
    assert sparse_memory([-1, 0], bounded=False).value_bounds(0.9) is None
    assert sparse_memory([0, 0]).value_bounds(1.0) == (-np.inf, 0)
    other = sparse_memory([-1, 0.5, 0])
    assert other.value_bounds(0.9) is None
    again = sparse_memory([0, 0, 0])
    again.load_state(other.state())
    assert again.value_bounds(0.9) is None, "what has left the buffer counts after a resume too"


@pytest.mark.parametrize("name", ["ddpg", "td3", "dqn"])
def test_targets_are_clipped_to_known_value_bounds(name: str) -> None:
    described = CHOICE if name == "dqn" else BOXES
    algorithm, batch = make(name, described), minibatch(described)
    bounded = replace(batch, bounds=torch.tensor([-0.5, 0.0]))
    if name == "dqn":
        predicted, after = torch.zeros(9, 1), torch.randn(9, 1, generator=torch.Generator().manual_seed(1))
        both = [algorithm._each(its, predicted, after, its.reward, its.discount)[1] for its in (batch, bounded)]
    else:
        both = [algorithm.targets_of(its, torch.zeros(9, 2)) for its in (batch, bounded)]
    assert (both[0] < -0.5).any() and (both[0] > 0).any()
    torch.testing.assert_close(both[1], both[0].clamp(-0.5, 0.0))
