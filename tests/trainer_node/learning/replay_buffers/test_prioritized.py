"""Prioritized replay: probabilities and weights as in the paper, by a sum tree that agrees with running sums."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagecoach.shared.config.algorithms.replay_buffer import PrioritizedReplay as Section
from stagecoach.shared.config.schema.section import Schedule
from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.experience.spaces import Array
from stagecoach.trainer_node.learning.algorithms.off_policy import make_replay_buffer
from stagecoach.trainer_node.learning.replay_buffers.prioritized import PrioritizedReplayBuffer, SumTree
from tests.support.learning.streams import PLAIN, Stream, fill, known, numbers

ALPHA, EPSILON = 0.7, 0.01


def filled(stream: Stream, places: int, made: int) -> PrioritizedReplayBuffer:
    section = Section(capacity=places * stream.steps * stream.slots, alpha=ALPHA, epsilon=EPSILON)
    memory = make_replay_buffer(section, PLAIN, stream.steps, stream.slots)
    assert isinstance(memory, PrioritizedReplayBuffer)
    fill(memory, stream.fragments(made))
    return memory


def with_errors(seed: int = 5) -> tuple[PrioritizedReplayBuffer, dict[int, float], dict[int, int]]:
    """A memory in which every step had its own TD error; by number, priorities as the paper has them, and rows."""
    stream = Stream(seed, PLAIN, 6, 3)
    memory = filled(stream, 4, 9)
    batch = memory.sample(2000, np.random.default_rng(1), gamma=1.0)
    rows = dict(zip(numbers(batch.observations).tolist(), batch.row.tolist(), strict=True))
    assert set(rows) == set(known(stream.made[-4:], stream.made))
    errors = np.random.default_rng(2).normal(size=len(rows)) * 3
    memory.update_priorities(np.array(list(rows.values())), errors.astype(np.float32))
    priorities = {number: (abs(error) + EPSILON) ** ALPHA for number, error in zip(rows, errors.tolist(), strict=True)}
    return memory, priorities, rows


def test_draw_frequency_follows_priority() -> None:
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


def test_errors_that_are_not_finite_leave_a_memory_that_draws() -> None:
    memory, _, rows = with_errors()
    some = np.array(list(rows.values())[:3])
    memory.update_priorities(some, np.array([np.nan, np.inf, -np.inf], np.float32))
    largest = memory.state()["largest"]
    assert np.isfinite(largest)
    assert memory.state()["powers"][some].tolist() == pytest.approx([float(largest) ** ALPHA] * 3)
    memory.update_priorities(some, np.array([1e38, 1e30, 0.0], np.float32))
    assert set(memory.sample(50, np.random.default_rng(0), gamma=1.0).row.tolist()) <= set(rows.values())


def test_row_of_absent_agent_gets_no_priority() -> None:
    memory, _, rows = with_errors()
    absent = np.setdiff1d(np.arange(memory.fragments * 18), list(rows.values()))
    assert absent.size
    memory.update_priorities(absent, np.full(absent.size, 1e6, np.float32))
    assert set(memory.sample(500, np.random.default_rng(0), gamma=1.0).row.tolist()) <= set(rows.values())


def test_saved_state_does_not_change_with_buffer() -> None:
    memory, _, rows = with_errors()
    state = memory.state()
    before = {name: array.copy() for name, array in state.items()}
    memory.update_priorities(np.array(list(rows.values())), np.full(len(rows), 9.0, np.float32))
    assert all(np.array_equal(array, before[name]) for name, array in state.items())


def test_bias_correction_follows_schedule() -> None:
    section = Section(beta=Schedule(kind="linear", start=0.4, end=1.0, over="100 updates"))
    assert section.importance(Counters(updates=50)) == pytest.approx(0.7)


# The sum tree


def expected(numbers: Array, shares: Array) -> list[int]:
    """Row by row: the first at which the running sum is above the share of the total."""
    found = []
    for share in shares:
        mass, row = share * numbers.sum(), 0
        while numbers[: row + 1].sum() <= mass:
            row += 1
        found.append(row)
    return found


@settings(max_examples=80, derandomize=True)
@given(
    seed=st.integers(0, 10_000), size=st.integers(1, 70), changes=st.integers(1, 5), whole=st.sampled_from([1, 8, 512])
)
def test_rows_are_found_by_running_sums(seed: int, size: int, changes: int, whole: int) -> None:
    random = np.random.default_rng(seed)
    tree, numbers = SumTree(size, whole), np.zeros(size)
    for _ in range(changes):
        rows = random.integers(size, size=random.integers(1, 9))
        values = random.integers(0, 4, size=len(rows)) / 4.0  # exact in float64, also when summed
        tree.put(rows, values)
        for row, value in zip(rows, values, strict=True):  # the last of equal rows counts
            numbers[row] = value
        first = int(random.integers(size))
        part = random.integers(0, 4, size=random.integers(1, size - first + 1)) / 4.0
        tree.put_from(first, part)
        numbers[first : first + len(part)] = part
        assert np.array_equal(tree.numbers, numbers)
        if numbers.any():
            shares = np.append(random.random(20), [0.0, np.nextafter(1.0, 0.0)])
            assert tree.find(shares).tolist() == expected(numbers, shares)


@pytest.mark.parametrize("whole", [1, 16, 1024])
@pytest.mark.parametrize("seed", range(10))
def test_zero_priority_is_never_drawn(seed: int, whole: int) -> None:
    random = np.random.default_rng(seed)
    numbers = (10.0 ** random.uniform(-30, 30, size=1000)) * (random.random(1000) < 0.3)
    tree = SumTree(1000, whole)
    tree.put_from(0, numbers)
    shares = np.append(random.random(5000), [0.0, np.nextafter(1.0, 0.0)])
    assert (numbers[tree.find(shares)] > 0).all()


def test_rounded_up_sum_draws_no_zero_priority() -> None:
    large = 2.0**52 + 2  # the total is rounded up by half, what is left of it on the right as well
    tree = SumTree(4, 1)
    tree.put_from(0, np.array([1.5, 0.0, large, 0.0]))
    assert tree.find(np.array([np.nextafter(1.0, 0.0), 1.0])).tolist() == [2, 2]


def test_sum_tree_depends_on_its_numbers_only() -> None:
    random = np.random.default_rng(3)
    numbers = random.random(300)
    at_once, in_parts = SumTree(300), SumTree(300)
    at_once.put_from(0, numbers)
    for _ in range(5):
        in_parts.put(random.permutation(300)[:200], random.random(200) * 1e6)
    for rows in np.array_split(random.permutation(300), 7):
        in_parts.put(rows, numbers[rows])
    shares = random.random(20_000)
    assert np.array_equal(at_once.find(shares), in_parts.find(shares))
