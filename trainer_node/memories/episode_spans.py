"""Where episodes begin and end in a ring of fragments, and the steps between, by whole fragments at a time."""

from __future__ import annotations

import numpy as np

from shared.spaces import Array
from trainer_node.memories.ring import NOTHING, FragmentRing


class EpisodeSpans:
    """For each step, which steps of its fragment are of the same episode; eight bytes a row."""

    def __init__(self, ring: FragmentRing) -> None:
        self._ring = ring
        shape = (ring.fragments, ring.steps, ring.slots)
        self._first, self._last = np.zeros(shape, np.int32), np.zeros(shape, np.int32)

    def put(self, place: int) -> None:
        """Takes in the fragment that is now in `place`."""
        ring = self._ring
        rows = np.arange(place * ring.rows_each, (place + 1) * ring.rows_each).reshape(ring.steps, ring.slots)
        step = np.arange(ring.steps)[:, None]
        goes_on = ring.next_rows(rows) != NOTHING
        goes_on[-1] = False
        began = np.vstack([np.ones_like(goes_on[:1]), ~goes_on[:-1]])
        self._first[place] = np.maximum.accumulate(np.where(began, step, 0))
        self._last[place] = np.minimum.accumulate(np.where(goes_on, ring.steps, step)[::-1])[::-1]

    def ends(self, rows: Array) -> tuple[Array, Array]:
        """The last known step of each one's episode, and how many steps later that is."""
        ring, last = self._ring, self._last.reshape(-1)
        ahead = last[rows] - self._step(rows)
        end = rows + ahead * ring.slots
        while True:
            after = ring.next_rows(end)
            more = after != NOTHING
            if not more.any():
                return end, ahead
            ahead = ahead + np.where(more, last[after] + 1, 0)
            end = np.where(more, after + last[after] * ring.slots, end)

    def begins(self, rows: Array) -> tuple[Array, Array]:
        """The first known step of each one's episode, and how many steps earlier that is."""
        ring, first = self._ring, self._first.reshape(-1)
        behind = self._step(rows) - first[rows]
        begin = rows - behind * ring.slots
        while True:
            place = ring.preceding[begin // ring.rows_each]
            before = (place + 1) * ring.rows_each - ring.slots + begin % ring.slots
            more = (place != NOTHING) & (ring.next_rows(np.where(place != NOTHING, before, 0)) == begin)
            if not more.any():
                return begin, behind
            part = np.where(more, ring.steps - first[np.where(more, before, 0)], 0)
            behind = behind + part
            begin = np.where(more, before - (part - 1) * ring.slots, begin)

    def later(self, rows: Array, count: Array) -> Array:
        """The steps that are so many steps later in the same episode; they must be known."""
        ring, last = self._ring, self._last.reshape(-1)
        rows, count = rows.copy(), count.copy()
        while True:
            room = last[rows] - self._step(rows)
            beyond = count > room
            rows += np.minimum(count, room) * ring.slots
            if not beyond.any():
                return rows
            count = np.where(beyond, count - room - 1, 0)
            rows = np.where(beyond, ring.next_rows(rows), rows)

    def _step(self, rows: Array) -> Array:
        found: Array = rows % self._ring.rows_each // self._ring.slots
        return found
