"""The rows that may be drawn, by class: how many there are, and the n-th of them. Absent agents' rows are in none."""

from __future__ import annotations

import numpy as np

from shared.spaces import Array


class RowIndex:
    """Of `fragments` places with `rows` rows each; four bytes a row."""

    def __init__(self, fragments: int, rows: int, classes: int = 1) -> None:
        self._rows = rows
        self._order = np.zeros((fragments, rows), np.int32)
        self._starts = np.zeros((fragments, classes + 1), np.int32)
        self._before = np.zeros((classes, fragments + 1), np.int64)
        self.counts = np.zeros(classes, np.int64)
        """Rows of each class."""

    def put(self, place: int, classes: Array) -> None:
        """The rows of the fragment in `place` are of these classes `[rows]`; −1 for none."""
        order = np.argsort(classes, kind="stable").astype(np.int32)
        self._order[place] = order
        self._starts[place] = np.searchsorted(classes[order], np.arange(len(self.counts) + 1))
        np.cumsum(np.diff(self._starts, axis=1).T, axis=1, out=self._before[:, 1:])
        self.counts = self._before[:, -1].copy()

    def rows(self, which: int, numbers: Array) -> Array:
        """The rows of a class with these numbers (0 … its count − 1), in the order of the places."""
        place = np.searchsorted(self._before[which], numbers, side="right") - 1
        local = self._starts[place, which] + (numbers - self._before[which, place])
        found: Array = place * self._rows + self._order[place, local]
        return found
