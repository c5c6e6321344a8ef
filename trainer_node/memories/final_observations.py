"""The true last observations of episodes that ended: few, so they lie in a pool of their own that grows as it must.

Fragments leave the ring in the order in which they came, so the pool is a ring as well. An observation is known by its
number since the start (its lowest 31 bits, which a resize does not change).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shared.spaces import Array, Columns

_NUMBERS = (1 << 31) - 1


class FinalObservations:
    """Columns `obs…` of the last observations that the fragments in the ring have."""

    def __init__(self, fragments: int) -> None:
        self._size = 64
        self._columns: Columns = {}
        self._held = np.zeros(fragments, np.int64)
        self._end = 0
        self.begin = 0
        """How many have been given up so far."""

    def hold(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        """Has a column of this name, with rows of this shape; before the first `put`."""
        self._columns[name] = np.zeros((self._size, *shape), dtype)

    def resume(self, begin: int) -> None:
        """Goes on, empty, after so many have been given up."""
        self.begin = self._end = begin
        self._held[:] = 0

    def put(self, place: int, count: int, columns: Columns) -> Array:
        """The numbers (int32) of `count` rows of `final_obs…`; what the fragment before had in `place` is given up."""
        self.begin += int(self._held[place])
        self._held[place] = count
        self._grow(self._end + count - self.begin)
        numbers = np.arange(self._end, self._end + count)
        for name, array in self._columns.items():
            array[numbers & (self._size - 1)] = columns[f"final_{name}"]
        self._end += count
        return (numbers & _NUMBERS).astype(np.int32)

    def _grow(self, needed: int) -> None:
        size = self._size
        while size < needed:
            size *= 2
        if size > self._size:
            held = np.arange(self.begin, self._end)
            for name, array in self._columns.items():
                self._columns[name] = np.zeros((size, *array.shape[1:]), array.dtype)
                self._columns[name][held & (size - 1)] = array[held & (self._size - 1)]
            self._size = size

    def take(self, name: str, numbers: Array) -> Array:
        """The rows of one column with these numbers."""
        found: Array = self._columns[name][numbers & (self._size - 1)]
        return found
