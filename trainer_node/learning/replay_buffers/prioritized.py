"""Prioritized replay (Schaul et al. 2016), the proportional kind: P(i) ∝ (|δ_i| + ε)^α.

A batch is stratified: one transition from each of B equal parts of the total. Its importance weights (N · P(i))^−β are
divided by the largest of the batch. A new transition gets the largest priority there has been so far (1 at first), so
that it is soon drawn.
"""

from typing import Any

import numpy as np

from stagecoach.shared.experience.spaces import Array, Columns
from stagecoach.trainer_node.learning.replay_buffers.uniform import ReplayBuffer

_LEAST, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


class PrioritizedReplayBuffer(ReplayBuffer):
    """Draws by priority. Rows that may not be drawn, of absent agents, have none."""

    def __init__(self, *size: Any, alpha: float, epsilon: float) -> None:
        super().__init__(*size)
        self._alpha, self._epsilon = alpha, epsilon
        self._tree = SumTree(self.rows)
        self._largest = 1.0

    def added(self, rows: slice, drawable: Array) -> None:
        self._tree.put_from(rows.start, drawable * self._powers(self._largest))

    def _powers(self, priorities: Array | float) -> Array:
        return np.clip(np.power(priorities, self._alpha), _LEAST, _MOST).astype(np.float32)

    def draw(self, count: int, generator: np.random.Generator, beta: float) -> tuple[Array, Array]:
        self._refuse_if_empty()
        rows = self._tree.find((np.arange(count) + generator.random(count)) / count)
        powers = self._tree.numbers[rows]
        return rows, np.power(powers.min() / powers, beta).astype(np.float32)

    def update_priorities(self, rows: Array, td_errors: Array) -> None:
        """Sets the rows' priorities from their TD errors; the last error of a repeated row counts.

        A non-finite error (a diverging network) counts as the largest priority so far.
        """
        priorities = np.abs(td_errors.astype(np.float64)) + self._epsilon
        priorities[~np.isfinite(priorities)] = self._largest
        self._largest = max(self._largest, float(priorities.max(initial=0.0)))
        self._tree.put(rows, self._powers(priorities) * (self._tree.numbers[rows] > 0))

    def state(self) -> Columns:
        """Adds the priorities of the held rows, to the power of α."""
        held = min(self._ever_added, self.ring.fragments) * self.ring.rows_each
        powers = self._tree.numbers[:held].astype(np.float32)
        return super().state() | {"powers": powers, "largest": np.array(self._largest)}

    def _emptied(self) -> Columns:
        return super()._emptied() | {"powers": np.zeros(0, np.float32)}

    def load_state(self, arrays: Columns) -> None:
        super().load_state(arrays)
        self._largest = float(arrays["largest"])
        self._tree = SumTree(self.rows)
        if len(arrays["powers"]):
            self._tree.put_from(0, arrays["powers"])


class SumTree:
    """`size` non-negative numbers, float64, as a binary tree in one array: node i above nodes 2i and 2i + 1. A batch
    begins at a level of some hundred nodes, which is searched whole, and goes down level by level together. A node is
    the sum of the two below it and never changed by a difference: equal numbers make equal trees."""

    def __init__(self, size: int, searched_whole: int = 512) -> None:
        """`searched_whole`: nodes of the level that a batch begins at, a power of 2."""
        self._depth = max(1, (size - 1).bit_length())
        self._first = 1 << self._depth
        self._begin = min(searched_whole, self._first)
        self._nodes = np.zeros(2 * self._first, np.float64)
        self.numbers: Array = self._nodes[self._first : self._first + size]
        """`[size]`; to be changed by `put` and `put_from` only."""

    def put(self, rows: Array, numbers: Array) -> None:
        """Sets the numbers of these rows; the last number of a repeated row counts."""
        nodes, places = self._nodes, rows + self._first
        nodes[places] = numbers
        for _ in range(self._depth):
            places = places >> 1
            left = places << 1
            nodes[places] = nodes[left] + nodes[left + 1]

    def put_from(self, first: int, numbers: Array) -> None:
        nodes, begin, end = self._nodes, self._first + first, self._first + first + len(numbers)
        nodes[begin:end] = numbers
        for _ in range(self._depth):
            begin, end = begin >> 1, (end + 1) >> 1
            nodes[begin:end] = nodes[2 * begin : 2 * end : 2] + nodes[2 * begin + 1 : 2 * end : 2]

    def find(self, shares: Array) -> Array:
        """Returns the rows at these shares `[B]` (0 to below 1) of the total, which is not 0. A share beyond the last
        non-zero number, by rounding, selects that number; a 0 is never selected."""
        nodes, before = self._nodes, np.zeros(self._begin + 1)
        np.cumsum(nodes[self._begin : 2 * self._begin], out=before[1:])
        rest = np.minimum(shares * before[-1], np.nextafter(before[-1], 0.0))
        places = before.searchsorted(rest, side="right") - 1
        rest -= before[places]
        places += self._begin
        for _ in range((self._first // self._begin).bit_length() - 1):
            places <<= 1
            left = nodes[places]
            to_the_right = (rest >= left) & (nodes[places + 1] > 0)
            rest -= left * to_the_right
            places += to_the_right
        found: Array = places - self._first
        return found
