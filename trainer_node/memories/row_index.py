"""The rows that may be drawn, numbered class by class and within a class in the order of their places.

Absent agents' rows have no number. Numbers change as fragments come and go; rows do not.
"""

from __future__ import annotations

import numpy as np

from shared.spaces import Array


class RowIndex:
    """Of `fragments` places with `rows` rows each; four bytes a row."""

    def __init__(self, fragments: int, rows: int, classes: int) -> None:
        self._fragments, self._rows, self._classes = fragments, rows, classes
        self._order = np.zeros((fragments, rows), np.int32)
        self._starts = np.zeros((fragments, classes + 1), np.int32)
        self._before = np.zeros(classes * fragments + 1, np.int64)
        self.bounds = np.zeros(classes + 1, np.int64)
        """Class c has the numbers from `bounds[c]` to below `bounds[c + 1]`."""

    def put(self, place: int, classes: Array) -> None:
        """The rows of the fragment in `place` are of these classes `[rows]`; −1 for none."""
        order = np.argsort(classes, kind="stable").astype(np.int32)
        self._order[place] = order
        self._starts[place] = np.searchsorted(classes[order], np.arange(self._classes + 1))
        np.cumsum(np.diff(self._starts, axis=1).T, out=self._before[1:])
        self.bounds = self._before[:: self._fragments].copy()

    def rows(self, numbers: Array) -> Array:
        """The rows with these numbers."""
        cell = np.searchsorted(self._before, numbers, side="right") - 1
        which, place = np.divmod(cell, self._fragments)
        local = self._starts[place, which] + (numbers - self._before[cell])
        found: Array = place * self._rows + self._order[place, local]
        return found
