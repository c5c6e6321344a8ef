"""Balanced replay: equal shares of what there is, whatever there is most of."""

from __future__ import annotations

import numpy as np
import pytest

from shared.errors import ConfigError
from shared.memory_config import BalancedMemory as Section
from shared.spaces import Leaf, PolicySpaces, SpaceSpec
from tests.trainer_node.memories.streams import PLAIN, VECTOR, Stream, fill, known, numbers
from tests.trainer_node.memories.test_replay import arrays, check, quick, restored, shapes
from trainer_node.memories.balanced import BalancedMemory, Classes
from trainer_node.memories.make import make_memory

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
    memory = BalancedMemory(PLAIN, steps, slots, places * steps * slots, classes=classes)
    fill(memory, [(item.source, item.columns) for item in stream.made])
    truth = known(stream.made[-places:], stream.made)
    assert len(memory) == len(truth)
    if not truth:
        return
    batch = memory.sample(32, np.random.default_rng(seed), gamma=0.9)
    check(batch, truth, 1, 0.9)
    drawn = [class_of(*pair, classes) for pair in zip(batch.actions["action"], batch.reward, strict=True)]
    there = {class_of(step.action, step.reward, classes) for step in truth.values()}
    assert all(32 // len(there) <= drawn.count(kind) <= -(-32 // len(there)) for kind in there)
    assert set(drawn) == there


def test_within_a_class_every_transition_is_as_probable() -> None:
    stream = Stream(4, PLAIN, 8, 3)
    rare(stream, 5)
    memory = BalancedMemory(PLAIN, 8, 3, 120, classes="action")
    fill(memory, [(item.source, item.columns) for item in stream.made])
    truth = known(stream.made, stream.made)
    drawn = numbers(memory.sample(60_000, np.random.default_rng(1), gamma=1.0).observations)
    for kind in range(3):
        members = [number for number, step in truth.items() if step.action == kind]
        each = 20_000 / len(members)
        squares = sum(((drawn == number).sum() - each) ** 2 / each for number in members)
        assert members and squares < len(members) + 6 * (2 * len(members)) ** 0.5


def test_what_is_left_over_falls_to_each_class_in_turn() -> None:
    stream = Stream(4, PLAIN, 8, 3)
    memory = BalancedMemory(PLAIN, 8, 3, 120, classes="action")
    fill(memory, [(item.source, item.columns) for item in stream.fragments(5)])
    single = [int(memory.sample(1, np.random.default_rng(n), gamma=1.0).actions["action"][0]) for n in range(300)]
    assert all(70 < single.count(kind) < 130 for kind in range(3))


def test_it_is_restored_bit_for_bit() -> None:
    for made in range(1, 9):
        stream = Stream(made, PLAIN, 4, 2)
        memory = BalancedMemory(PLAIN, 4, 2, 24, classes="reward_sign")
        fill(memory, [(item.source, item.columns) for item in stream.fragments(made)])
        again = restored(memory, BalancedMemory(PLAIN, 4, 2, 24, classes="reward_sign"), stream.made)
        one, two = (arrays(item.sample(32, np.random.default_rng(1), gamma=0.9, n_step=2)) for item in (memory, again))
        assert [name for name, array in one.items() if not np.array_equal(two[name], array)] == []


def test_the_section_makes_it() -> None:
    memory = make_memory(Section(capacity=9, classes="reward_sign"), PLAIN, 4, 2)
    assert isinstance(memory, BalancedMemory) and memory.fragments == 2 and memory.classes == 3


def test_actions_that_are_no_classes_are_refused() -> None:
    box = PolicySpaces(VECTOR, SpaceSpec((Leaf("", "box", (1,), "float32"),), 0))
    with pytest.raises(ConfigError, match="reward_sign"):
        make_memory(Section(), box, 4, 2)
    assert make_memory(Section(classes="reward_sign"), box, 4, 2).fragments
