"""Prioritised replay: probabilities and weights as in the paper, and priorities that survive a resume."""

from __future__ import annotations

import numpy as np
import pytest

from shared.memory_config import PrioritisedMemory as Section
from shared.schedules import Schedule
from shared.spaces import Array, Columns
from shared.steps import Counters
from tests.trainer_node.memories.streams import PLAIN, Stream, fill, known, numbers
from tests.trainer_node.memories.test_replay import arrays, check, contents, quick, restored, shapes
from trainer_node.memories.make import make_memory
from trainer_node.memories.prioritised import PrioritisedMemory

ALPHA, EPSILON = 0.7, 0.01


def empty(stream: Stream, places: int) -> PrioritisedMemory:
    return PrioritisedMemory(
        PLAIN, stream.steps, stream.slots, places * stream.steps * stream.slots, alpha=ALPHA, epsilon=EPSILON
    )


def filled(stream: Stream, places: int, made: int) -> PrioritisedMemory:
    memory = empty(stream, places)
    fill(memory, [(item.source, item.columns) for item in stream.fragments(made)])
    return memory


def rows_by_number(memory: PrioritisedMemory) -> dict[int, int]:
    """Where each step lies."""
    batch = memory.sample(2000, np.random.default_rng(1), gamma=1.0)
    return dict(zip(numbers(batch.observations).tolist(), batch.row.tolist(), strict=True))


def with_errors(seed: int = 5) -> tuple[PrioritisedMemory, dict[int, float], dict[int, int]]:
    """A memory in which every step had its own TD error: the priorities by number, as the paper has them."""
    stream = Stream(seed, PLAIN, 6, 3)
    memory = filled(stream, 4, 9)
    rows = rows_by_number(memory)
    assert set(rows) == set(known(stream.made[-4:], stream.made))
    errors = np.random.default_rng(2).normal(size=len(rows)) * 3
    memory.update_priorities(np.array(list(rows.values())), errors.astype(np.float32))
    priorities = {number: (abs(error) + EPSILON) ** ALPHA for number, error in zip(rows, errors.tolist(), strict=True)}
    return memory, priorities, rows


def test_a_transition_is_drawn_as_its_priority_says() -> None:
    memory, priorities, _ = with_errors()
    draws, total = 40_000, sum(priorities.values())
    batch = memory.sample(draws, np.random.default_rng(3), gamma=0.9)
    found, counts = np.unique(numbers(batch.observations), return_counts=True)
    assert set(found.tolist()) == set(priorities)
    for number, drawn in zip(found.tolist(), counts.tolist(), strict=True):
        assert drawn == pytest.approx(draws * priorities[number] / total, abs=2)  # each has strata of its own


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_weights_undo_what_priorities_do(beta: float) -> None:
    memory, priorities, _ = with_errors()
    batch = memory.sample(64, np.random.default_rng(3), gamma=0.9, beta=beta)
    drawn = numbers(batch.observations).tolist()
    total = sum(priorities.values())
    plain = [(len(memory) * priorities[number] / total) ** -beta for number in drawn]
    np.testing.assert_allclose(batch.weight, [weight / max(plain) for weight in plain], rtol=1e-5)
    assert batch.weight.dtype == np.float32 and batch.weight.max() == 1


def test_a_batch_has_one_of_each_part_of_the_total() -> None:
    memory, _, _ = with_errors()
    sums = np.cumsum(memory.state()["powers"].astype(np.float64))
    for seed in range(20):
        rows = memory.sample(16, np.random.default_rng(seed), gamma=0.9).row
        for part, row in enumerate(rows.tolist()):
            begin, end = (sums[row - 1] if row else 0.0), sums[row]
            assert begin < (part + 1) / 16 * sums[-1] + 1e-9 and end > part / 16 * sums[-1] - 1e-9


def test_new_transitions_have_the_largest_priority_so_far() -> None:
    stream = Stream(8, PLAIN, 3, 2)
    stream.absent = 0.0
    memory = filled(stream, 3, 2)
    assert set(memory.state()["powers"].tolist()) == {1.0}
    memory.update_priorities(np.array([0, 1]), np.array([7.0, 2.0], np.float32))
    memory.update_priorities(np.array([0]), np.array([0.5], np.float32))  # the largest has been 7 none the less
    (item,) = stream.fragments(1)
    memory.add(item.source, item.columns)
    assert memory.state()["powers"][12:].tolist() == pytest.approx([(7.0 + EPSILON) ** ALPHA] * 6)


def test_of_a_row_that_is_drawn_twice_the_last_error_counts() -> None:
    memory, _, rows = with_errors()
    row = next(iter(rows.values()))
    memory.update_priorities(np.array([row, row]), np.array([5.0, 1.0], np.float32))
    assert memory.state()["powers"][row] == pytest.approx((1.0 + EPSILON) ** ALPHA)


def test_errors_that_are_not_finite_leave_a_memory_that_draws() -> None:
    memory, _, rows = with_errors()
    some = np.array(list(rows.values())[:3])
    memory.update_priorities(some, np.array([np.nan, np.inf, -np.inf], np.float32))
    largest = memory.state()["largest"]
    assert np.isfinite(largest)
    assert memory.state()["powers"][some].tolist() == pytest.approx([float(largest) ** ALPHA] * 3)
    memory.update_priorities(some, np.array([1e38, 1e30, 0.0], np.float32))
    assert set(memory.sample(50, np.random.default_rng(0), gamma=1.0).row.tolist()) <= set(rows.values())


def test_an_absent_agents_row_cannot_get_a_priority() -> None:
    memory, _, rows = with_errors()
    absent = np.setdiff1d(np.arange(memory.fragments * 18), list(rows.values()))
    assert absent.size
    memory.update_priorities(absent, np.full(absent.size, 1e6, np.float32))
    assert set(memory.sample(500, np.random.default_rng(0), gamma=1.0).row.tolist()) <= set(rows.values())


@quick
@shapes
def test_it_draws_what_was_acted(seed: int, steps: int, slots: int, places: int, made: int) -> None:
    stream = Stream(seed, PLAIN, steps, slots)
    memory = filled(stream, places, made)
    truth = known(stream.made[-places:], stream.made)
    assert len(memory) == len(truth)
    if truth:
        check(memory.sample(50, np.random.default_rng(seed), n_step=3, gamma=0.9), truth, 3, 0.9)


def errors_of(rows: Array) -> Array:
    return np.asarray(np.sin(rows * 12.9898) * 4, np.float32)


@quick
@shapes
def test_it_is_restored_bit_for_bit(seed: int, steps: int, slots: int, places: int, made: int) -> None:
    stream = Stream(seed, PLAIN, steps, slots)
    memory = empty(stream, places)

    def goes_on(which: PrioritisedMemory, number: int) -> Columns:
        which.add(stream.made[number].source, stream.made[number].columns)
        if not len(which):
            return {}
        batch = which.sample(8, np.random.default_rng(number), gamma=0.9, n_step=2, beta=0.5)
        which.update_priorities(batch.row, errors_of(batch.row))
        return arrays(batch)

    stream.fragments(made)
    for number in range(made):
        goes_on(memory, number)
    again = restored(memory, empty(stream, places), stream.made)
    stream.fragments(3)
    for number in range(made, made + 3):
        found, expected = contents(again), contents(memory)
        assert found.keys() == expected.keys()
        assert [name for name, array in expected.items() if not np.array_equal(found[name], array)] == []
        assert np.array_equal(again._tree._nodes, memory._tree._nodes)
        one, two = goes_on(memory, number), goes_on(again, number)
        assert [name for name, array in one.items() if not np.array_equal(two[name], array)] == []


def test_a_state_does_not_change_with_the_memory() -> None:
    memory, _, rows = with_errors()
    state = memory.state()
    before = {name: array.copy() for name, array in state.items()}
    memory.update_priorities(np.array(list(rows.values())), np.full(len(rows), 9.0, np.float32))
    assert all(np.array_equal(array, before[name]) for name, array in state.items())


def test_the_section_makes_it() -> None:
    section = Section(capacity=40, alpha=0.0, beta=Schedule(kind="linear", start=0.4, end=1.0, over="100 updates"))
    memory = make_memory(section, PLAIN, 4, 2)
    assert isinstance(memory, PrioritisedMemory) and memory.fragments == 5
    assert section.importance(Counters(updates=50)) == pytest.approx(0.7)
    stream = Stream(1, PLAIN, 4, 2)
    fill(memory, [(item.source, item.columns) for item in stream.fragments(5)])
    memory.update_priorities(np.arange(8), np.arange(8, dtype=np.float32))
    assert set(memory.state()["powers"].tolist()) == {0.0, 1.0}  # α = 0 is uniform
