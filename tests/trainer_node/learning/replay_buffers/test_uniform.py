"""Every replay buffer: what is drawn is what was acted, and it is restored bit for bit. Uniform and balanced ones."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest

from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.config.algorithms.replay_buffer import (
    BalancedReplay,
    HindsightReplay,
    PrioritizedReplay,
    UniformReplay,
)
from stagecoach.shared.experience.spaces import Columns, Leaf, PolicySpaces, SpaceSpec
from stagecoach.trainer_node.learning.algorithms.off_policy import make_replay_buffer
from stagecoach.trainer_node.learning.building_blocks.interface import Experience
from stagecoach.trainer_node.learning.replay_buffers.uniform import BalancedReplayBuffer, Classes, ReplayBuffer
from tests.support.learning.streams import (
    GOALS,
    PLAIN,
    VECTOR,
    Step,
    Stream,
    arrays,
    assert_drawn_from,
    assert_same,
    contents,
    fill,
    known,
    numbers,
    quick,
    restored,
    shapes,
)


def filled(stream: Stream, places: int, made: int) -> tuple[ReplayBuffer, dict[int, Step]]:
    """A memory of so many places that has seen so many fragments, and the steps that it should know."""
    memory = ReplayBuffer(stream.spaces, stream.steps, stream.slots, places * stream.steps * stream.slots)
    fill(memory, stream.fragments(made))
    return memory, known(stream.made[-places:], stream.made)


SECTIONS: dict[str, Any] = {
    "uniform": UniformReplay,
    "prioritized": PrioritizedReplay,
    "balanced": partial(BalancedReplay, classes="reward_sign"),
    "hindsight": partial(HindsightReplay, relabeled_fraction=0.0),
}
every_kind = pytest.mark.parametrize("kind", SECTIONS)


def made_by(kind: str, stream: Stream, places: int) -> ReplayBuffer:
    section = SECTIONS[kind](capacity=places * stream.steps * stream.slots)
    return make_replay_buffer(section, stream.spaces, stream.steps, stream.slots)


def stream_for(kind: str, seed: int, steps: int, slots: int) -> Stream:
    return Stream(seed, GOALS if kind == "hindsight" else PLAIN, steps, slots)


@quick
@shapes
@every_kind
@pytest.mark.parametrize("n", [1, 3])
def test_drawn_transitions_equal_acted_ones(
    n: int, kind: str, seed: int, steps: int, slots: int, places: int, made: int
) -> None:
    stream = stream_for(kind, seed, steps, slots)
    memory = made_by(kind, stream, places)
    fill(memory, stream.fragments(made))
    truth = known(stream.made[-places:], stream.made)
    assert len(memory) == len(truth)
    if truth:
        batch = memory.sample(50, np.random.default_rng(seed), n_step=n, gamma=0.9)
        assert_drawn_from(batch, truth, n, 0.9)
        assert {array.dtype for array in (batch.reward, batch.discount, batch.weight)} == {np.dtype(np.float32)}


@quick
@shapes
@every_kind
def test_replay_buffer_is_restored_bit_by_bit(
    kind: str, seed: int, steps: int, slots: int, places: int, made: int
) -> None:
    stream = stream_for(kind, seed, steps, slots)
    memory = made_by(kind, stream, places)

    def goes_on(which: ReplayBuffer, number: int) -> Columns:
        which.add(stream.made[number].source, stream.made[number].columns)
        if not len(which):
            return {}
        batch = which.sample(8, np.random.default_rng(number), gamma=0.9, n_step=2, beta=0.5)
        which.update_priorities(batch.row, np.asarray(np.sin(batch.row * 12.9898) * 4, np.float32))
        return arrays(batch)

    stream.fragments(made)
    for number in range(made):
        goes_on(memory, number)
    again = restored(memory, made_by(kind, stream, places), stream.made)
    stream.fragments(3)
    for number in range(made, made + 3):
        assert_same(contents(again), contents(memory))
        assert_same(goes_on(again, number), goes_on(memory, number))


@every_kind
def test_buffer_that_forgets_equals_a_new_one(kind: str) -> None:
    """But for the largest priority so far; and it is restored as one that never held more."""
    stream = stream_for(kind, 3, 4, 2)
    memory, new = made_by(kind, stream, 4), made_by(kind, stream, 4)
    fill(memory, stream.fragments(9))
    memory.forget()
    for each in (memory, new):
        fill(each, stream.made[-2:])
    assert_same(contents(memory), contents(new))
    again = restored(memory, made_by(kind, stream, 4), stream.made[-2:])
    assert_same(contents(again), contents(memory))
    assert len(again.sample(8, np.random.default_rng(0), gamma=0.9).row) == 8


def long_episode() -> Stream:
    stream = Stream(1, PLAIN, 4, 2)
    stream.ends = stream.absent = stream.lost = 0.0
    return stream


def test_another_life_of_a_worker_does_not_go_on_with_the_last() -> None:
    first, second = ([item for item in long_episode().fragments(9) if item.source == "w0:0.0"])[:2]
    memory = ReplayBuffer(PLAIN, 4, 2, 100)
    fill(memory, [Experience("w0:0.0", first.columns), Experience("w0:1.0", second.columns)])
    bootstraps = numbers(memory.sample(100, np.random.default_rng(0), n_step=9, gamma=1.0).next_observations)
    assert set(bootstraps) == {
        int(number) for item in (first, second) for number in item.columns["bootstrap_obs"][:, 0]
    }


def test_fragments_of_other_sources_are_not_continued() -> None:
    made = long_episode().fragments(1)[0].columns
    alike = made | {"obs": np.zeros_like(made["obs"]), "bootstrap_obs": np.zeros_like(made["bootstrap_obs"])}
    memory = ReplayBuffer(PLAIN, 4, 2, 16)
    fill(memory, [Experience(source, alike) for source in ("a", "b", "b", "a")])  # a's first is gone by then
    assert memory.ring.following.tolist() == [-1, -1] and memory.ring.preceding.tolist() == [-1, -1]
    fill(memory, [Experience("a", alike)])
    assert memory.ring.following.tolist() == [-1, 0] and memory.ring.preceding.tolist() == [1, -1]


def test_every_transition_is_as_probable() -> None:
    memory, truth = filled(Stream(5, PLAIN, 6, 3), 4, 9)
    draws = 400 * len(truth)
    drawn = Counter(numbers(memory.sample(draws, np.random.default_rng(7), gamma=1.0).observations).tolist())
    assert set(drawn) == set(truth)
    squares = sum((drawn[number] - 400) ** 2 / 400 for number in truth)
    assert squares < len(truth) + 5 * (2 * len(truth)) ** 0.5  # χ²: mean k, variance 2k


def test_draw_is_refused_before_buffer_is_refilled() -> None:
    stream = Stream(2, PLAIN, 4, 2)
    memory, _ = filled(stream, 3, 5)
    again = ReplayBuffer(PLAIN, 4, 2, 24)
    again.load_state(memory.state())
    again.add(stream.made[2].source, stream.made[2].columns)
    with pytest.raises(RuntimeError, match="2 of the fragments"):
        again.sample(1, np.random.default_rng(0), gamma=1.0)


def test_empty_buffer_refuses_to_draw() -> None:
    with pytest.raises(RuntimeError, match="empty"):
        ReplayBuffer(PLAIN, 4, 2, 24).sample(1, np.random.default_rng(0), gamma=1.0)


def test_fragment_of_another_shape_is_refused() -> None:
    (item,) = Stream(2, PLAIN, 4, 2).fragments(1)
    with pytest.raises(ValueError, match=r"\(4, 2\).*\(4, 3\)"):
        ReplayBuffer(PLAIN, 4, 3, 24).add(item.source, item.columns)


@pytest.mark.parametrize(("capacity", "fragments"), [(1, 1), (8, 1), (9, 2), (100, 13)])
def test_capacity_is_rounded_up_to_whole_fragments(capacity: int, fragments: int) -> None:
    assert ReplayBuffer(PLAIN, 4, 2, capacity).fragments == fragments


def test_last_observations_are_kept_as_long_as_their_fragments() -> None:
    stream = Stream(4, PLAIN, 20, 4)
    memory = ReplayBuffer(PLAIN, 20, 4, 6 * 80)
    for stream.ends in (0.1, 0.3, 0.9):  # more and more, so that the pool grows while it goes round
        fill(memory, stream.fragments(9))
        for _ in range(3):
            fill(memory, stream.fragments(1))
            batch = memory.sample(300, np.random.default_rng(0), gamma=0.5)
            assert_drawn_from(batch, known(stream.made[-6:], stream.made), 1, 0.5)
    assert memory.ring.finals == sum(len(item.columns["final_index"]) for item in stream.made[:-6])


def test_buffer_copies_what_it_is_given() -> None:
    (item,) = Stream(2, PLAIN, 4, 2).fragments(1)
    memory = ReplayBuffer(PLAIN, 4, 2, 24)
    memory.add(item.source, item.columns)
    before = contents(memory)
    for array in item.columns.values():
        array[:] = 0
    assert_same(contents(memory), before)


def test_transition_keeps_its_unique_number() -> None:
    items = Stream(3, PLAIN, 4, 2).fragments(11)
    memory, seen = ReplayBuffer(PLAIN, 4, 2, 3 * 8), dict[int, int]()
    for count, item in enumerate(items, start=1):
        memory.add(item.source, item.columns)
        rows = np.arange(min(count, 3) * 8)
        ordinals = memory.ring.numbers(rows)
        assert sorted(ordinals) == list(range(max(0, count - 3) * 8, count * 8))
        for step, ordinal in zip(numbers(memory.ring.observations(rows)), ordinals, strict=True):
            assert seen.setdefault(int(step), int(ordinal)) == ordinal


# Balanced

CLASSES: list[Classes] = ["action", "reward_sign"]


def rare(stream: Stream, made: int) -> None:
    """Of the fragments that come, most steps have action 0 and no reward."""
    for item in stream.fragments(made):
        for row, steps in enumerate(item.steps):
            for slot, step in enumerate(steps):
                if step.number % 11:
                    step.action, step.reward = 0, 0.0
                item.columns["action"][row, slot], item.columns["reward"][row, slot] = step.action, step.reward


def class_of(action: float, reward: float, classes: Classes) -> int:
    return int(action) if classes == "action" else int(np.sign(reward)) + 1


@quick
@shapes
@pytest.mark.parametrize("classes", CLASSES)
def test_each_class_that_there_is_has_its_share(
    classes: Classes, seed: int, steps: int, slots: int, places: int, made: int
) -> None:
    stream = Stream(seed, PLAIN, steps, slots)
    rare(stream, made)
    memory = BalancedReplayBuffer(PLAIN, steps, slots, places * steps * slots, classes=classes)
    fill(memory, stream.made)
    truth = known(stream.made[-places:], stream.made)
    assert len(memory) == len(truth)
    if not truth:
        return
    batch = memory.sample(32, np.random.default_rng(seed), gamma=0.9)
    assert_drawn_from(batch, truth, 1, 0.9)
    drawn = [class_of(*pair, classes) for pair in zip(batch.actions["action"], batch.reward, strict=True)]
    there = {class_of(step.action, step.reward, classes) for step in truth.values()}
    assert all(32 // len(there) <= drawn.count(kind) <= -(-32 // len(there)) for kind in there)
    assert set(drawn) == there


def test_within_a_class_every_transition_is_as_probable() -> None:
    stream = Stream(4, PLAIN, 8, 3)
    rare(stream, 5)
    memory = BalancedReplayBuffer(PLAIN, 8, 3, 120, classes="action")
    fill(memory, stream.made)
    truth = known(stream.made, stream.made)
    drawn = numbers(memory.sample(60_000, np.random.default_rng(1), gamma=1.0).observations)
    for kind in range(3):
        members = [number for number, step in truth.items() if step.action == kind]
        each = 20_000 / len(members)
        squares = sum(((drawn == number).sum() - each) ** 2 / each for number in members)
        assert members and squares < len(members) + 6 * (2 * len(members)) ** 0.5


def test_balanced_remainder_rotates_among_classes() -> None:
    stream = Stream(4, PLAIN, 8, 3)
    memory = BalancedReplayBuffer(PLAIN, 8, 3, 120, classes="action")
    fill(memory, stream.fragments(5))
    single = [int(memory.sample(1, np.random.default_rng(n), gamma=1.0).actions["action"][0]) for n in range(300)]
    assert all(70 < single.count(kind) < 130 for kind in range(3))


def test_actions_that_are_no_classes_are_refused() -> None:
    box = PolicySpaces(VECTOR, SpaceSpec((Leaf("", "box", (1,), "float32"),), 0))
    with pytest.raises(ConfigError, match="reward_sign"):
        make_replay_buffer(BalancedReplay(), box, 4, 2)
    assert make_replay_buffer(BalancedReplay(classes="reward_sign"), box, 4, 2).fragments
