"""A sum tree: non-negative numbers, of which one is found by where a share of their total falls in their running sum.

A binary tree in one array: node i above nodes 2i and 2i + 1, the numbers in the lower half. A batch begins at a level
of some hundred nodes, which is searched whole, and goes down level by level together. A node is the sum of the two
below it and never changed by a difference, so equal numbers make equal trees, in whatever order they came.
"""

from __future__ import annotations

import numpy as np

from shared.spaces import Array


class SumTree:
    """`size` numbers, all 0 at first; float64."""

    def __init__(self, size: int, searched_whole: int = 512) -> None:
        """`searched_whole`: nodes of the level that a batch begins at, a power of 2."""
        self._depth = max(1, (size - 1).bit_length())
        self._first = 1 << self._depth
        self._begin = min(searched_whole, self._first)
        self._nodes = np.zeros(2 * self._first, np.float64)
        self.numbers: Array = self._nodes[self._first : self._first + size]
        """`[size]`; to be changed by `put` and `put_from` only."""

    @property
    def total(self) -> float:
        """The sum of all numbers."""
        return float(self._nodes[1])

    def put(self, rows: Array, numbers: Array) -> None:
        """Sets the numbers of these rows; of a row that is there twice, the last one counts."""
        nodes, places = self._nodes, rows + self._first
        nodes[places] = numbers
        for _ in range(self._depth):
            places = places >> 1
            left = places << 1
            nodes[places] = nodes[left] + nodes[left + 1]

    def put_from(self, first: int, numbers: Array) -> None:
        """Sets the numbers of the rows from `first` on."""
        nodes, begin, end = self._nodes, self._first + first, self._first + first + len(numbers)
        nodes[begin:end] = numbers
        for _ in range(self._depth):
            begin, end = begin >> 1, (end + 1) >> 1
            nodes[begin:end] = nodes[2 * begin : 2 * end : 2] + nodes[2 * begin + 1 : 2 * end : 2]

    def find(self, shares: Array) -> Array:
        """The rows at these shares `[B]` (0 to below 1) of the total, which is not 0.

        Sums are rounded, so what falls beyond the last number that is not 0 is that one: a 0 is never found.
        """
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
