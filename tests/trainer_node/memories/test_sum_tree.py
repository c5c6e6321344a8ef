"""The sum tree against running sums over all its numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.spaces import Array
from trainer_node.memories.sum_tree import SumTree


def expected(numbers: Array, shares: Array) -> list[int]:
    """Row by row: the first at which the running sum is above the share of the total."""
    found = []
    for share in shares:
        mass, row = share * numbers.sum(), 0
        while numbers[: row + 1].sum() <= mass:
            row += 1
        found.append(row)
    return found


@settings(max_examples=80, deadline=None, derandomize=True)
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
        assert tree.total == numbers.sum() and np.array_equal(tree.numbers, numbers)
        if tree.total:
            shares = np.append(random.random(20), [0.0, np.nextafter(1.0, 0.0)])
            assert tree.find(shares).tolist() == expected(numbers, shares)


def test_each_row_has_its_share_of_the_total() -> None:
    numbers = np.array([0.0, 1.0, 3.0, 0.0, 4.0, 2.0, 0.0])
    tree = SumTree(len(numbers))
    tree.put_from(0, numbers)
    drawn = np.bincount(tree.find((np.arange(10_000) + 0.5) / 10_000), minlength=len(numbers))
    assert drawn.tolist() == [0, 1000, 3000, 0, 4000, 2000, 0]


@pytest.mark.parametrize("whole", [1, 16, 1024])
@pytest.mark.parametrize("seed", range(10))
def test_a_zero_is_never_found_whatever_is_rounded(seed: int, whole: int) -> None:
    random = np.random.default_rng(seed)
    numbers = (10.0 ** random.uniform(-30, 30, size=1000)) * (random.random(1000) < 0.3)
    tree = SumTree(1000, whole)
    tree.put_from(0, numbers)
    shares = np.append(random.random(5000), [0.0, np.nextafter(1.0, 0.0)])
    assert (numbers[tree.find(shares)] > 0).all()


def test_a_sum_that_was_rounded_up_leads_to_no_zero() -> None:
    large = 2.0**52 + 2  # the total is rounded up by half, what is left of it on the right as well
    tree = SumTree(4, 1)
    tree.put_from(0, np.array([1.5, 0.0, large, 0.0]))
    assert tree.find(np.array([np.nextafter(1.0, 0.0), 1.0])).tolist() == [2, 2]


def test_a_tree_depends_on_its_numbers_only() -> None:
    random = np.random.default_rng(3)
    numbers = random.random(300)
    at_once, in_parts = SumTree(300), SumTree(300)
    at_once.put_from(0, numbers)
    for _ in range(5):
        in_parts.put(random.permutation(300)[:200], random.random(200) * 1e6)
    for rows in np.array_split(random.permutation(300), 7):
        in_parts.put(rows, numbers[rows])
    assert np.array_equal(at_once._nodes, in_parts._nodes)
