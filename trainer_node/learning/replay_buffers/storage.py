"""The ring of fragments: preallocated columns, and for each step the row of the step that follows it.

With F fragments of T steps × S slots, a row is (fragment · T + step) · S + slot. Observations are stored once
(`ObservationColumn`), and of stacked images each frame (`FrameStacks`).
"""

from collections.abc import Sequence

import numpy as np

from stagecoach.shared.experience.fragment import INFO, expected_columns
from stagecoach.shared.experience.spaces import Array, Columns, PolicySpaces
from stagecoach.trainer_node.learning.replay_buffers.observation_column import NOTHING, ObservationColumn
from stagecoach.trainer_node.learning.replay_buffers.stacked_frames import FrameStacks, is_stacked, may_be_stacked

_MOST_ROWS = (1 << 31) - 1


class FragmentRing:
    """The newest fragments, in places 0 … F − 1 that are used in turn."""

    def __init__(
        self, spaces: PolicySpaces, steps: int, slots: int, fragments: int, info_columns: Sequence[str] = ()
    ) -> None:  # fmt: skip
        rows = fragments * steps * slots
        if not 0 < rows <= _MOST_ROWS:
            raise ValueError(f"a replay buffer of {rows} transitions: there must be 1 to {_MOST_ROWS}")
        self.spaces, self.steps, self.slots, self.fragments = spaces, steps, slots, fragments
        self.rows_each = steps * slots
        expected, told = expected_columns(spaces, steps, slots, 0, info_columns), (INFO + name for name in info_columns)
        self._names = ("reward", "terminated", "truncated", "mask", *spaces.action.column_names("action"), *told)
        self._columns = {name: np.zeros((fragments, *expected[name][0]), expected[name][1]) for name in self._names}
        self._flat = {name: _flat(array, 3) for name, array in self._columns.items()}
        self.observed: dict[str, ObservationColumn] = {
            leaf.column("obs"): FrameStacks(leaf.shape, steps, slots, fragments)
            if may_be_stacked(leaf, steps)
            else ObservationColumn(leaf.shape, leaf.column_dtype, steps, slots, fragments)
            for leaf in spaces.observation.leaves
        }
        self._seen_none = True
        self._final = np.full((fragments, steps, slots), NOTHING, np.int32)
        self._next = np.full((fragments, steps, slots), NOTHING, np.int32)
        self.following = np.full(fragments, NOTHING, np.int64)
        """Place → place of the fragment that continues it, −1 if unknown."""
        self.preceding = np.full(fragments, NOTHING, np.int64)
        """The inverse of `following`, while that fragment is there."""
        self._newest: dict[str, int] = {}
        self.added = 0
        self.finals = 0
        """Last observations that are gone with their fragments."""
        self._flat_final, self._flat_next = self._final.reshape(-1), self._next.reshape(-1)

    def add(self, source: str, columns: Columns) -> int:
        """Puts a fragment's columns in, in place of the oldest once the ring is full; returns its place. It continues
        the last fragment of `source` (worker and seed lineage) if observations are equal in all slots."""
        if columns["reward"].shape != (self.steps, self.slots):
            raise ValueError(f"a fragment of {columns['reward'].shape} for a buffer of {(self.steps, self.slots)}")
        place = self.added % self.fragments
        if self._seen_none:
            self._unstack(columns)
        self._give_up(place)
        before = self._newest.get(source, NOTHING)
        same = (its.ends_with(before, columns[name][0]) for name, its in self.observed.items())
        if before != NOTHING and not all(same):
            before = NOTHING
        for name in self._names:
            self._columns[name][place] = columns[name]
        where = columns["final_index"]
        for name, observed in self.observed.items():
            observed.put(place, columns[name], columns[f"bootstrap_{name}"], before)
            numbers = observed.put_finals(place, columns[f"final_{name}"], where, before != NOTHING)
            self._final[place, where[:, 0], where[:, 1]] = numbers  # the same of all columns
        self._link(place, before)
        self._newest[source] = place
        self.added += 1
        return place

    def resume(self, added: int, finals: int) -> int:
        """Empties the ring for adding the fragments again that it held after `added`; returns their number."""
        self.added = max(0, added - self.fragments)
        self.finals = finals
        self._newest.clear()
        for observed in self.observed.values():
            observed.clear()
        self.following[:] = self.preceding[:] = self._next[...] = self._final[...] = NOTHING
        return added - self.added

    def _give_up(self, place: int) -> None:
        self._newest = {source: where for source, where in self._newest.items() if where != place}
        after = self.following[place]
        for observed in self.observed.values():
            observed.give_up(place, int(after))
        self.finals += int(np.count_nonzero(self._final[place] != NOTHING))
        self._final[place] = NOTHING
        if after != NOTHING:
            self.preceding[after] = NOTHING
        self.following[place] = self.preceding[place] = NOTHING

    def _unstack(self, columns: Columns) -> None:
        """Decides by the first fragment which columns are stacked frames, not three colors of one image."""
        self._seen_none = False
        for name, observed in self.observed.items():
            if isinstance(observed, FrameStacks) and not is_stacked(columns[name]):
                size, shape = (self.steps, self.slots, self.fragments), columns[name].shape[2:]
                self.observed[name] = ObservationColumn(shape, np.uint8, *size)

    def _link(self, place: int, before: int) -> None:
        """Links each step to the next, within the fragment in `place` and from the fragment before it."""
        first, rows = place * self.rows_each, self.rows_each
        over = self._columns["terminated"][place] | self._columns["truncated"][place]
        goes_on = ~over & self._columns["mask"][place]
        numbers = np.arange(first + self.slots, first + rows, dtype=np.int32).reshape(-1, self.slots)
        self._next[place, :-1] = np.where(goes_on[:-1] & self._columns["mask"][place, 1:], numbers, NOTHING)
        self._next[place, -1] = NOTHING
        if before == NOTHING:
            return
        self.following[before], self.preceding[place] = place, before
        over = self._columns["terminated"][before, -1] | self._columns["truncated"][before, -1]
        goes_on = ~over & self._columns["mask"][before, -1] & self._columns["mask"][place, 0]
        self._next[before, -1] = np.where(goes_on, np.arange(first, first + self.slots), NOTHING)

    def numbers(self, rows: Array) -> Array:
        """Returns the unique number of each row among all transitions ever added, int64."""
        place, local = np.divmod(rows, self.rows_each)
        fragment = self.added - 1 - (self.added - 1 - place) % self.fragments
        return fragment * self.rows_each + local

    def column(self, name: str, rows: Array) -> Array:
        """`reward`, `terminated`, `truncated`, `mask`, `action…` or `info/…` of these rows (of any shape)."""
        return self._flat[name].take(rows, axis=0)

    def held(self, name: str, place: int) -> Array:
        """A whole column of the fragment in `place`, `[T · S, …]`; not to be written to."""
        return _flat(self._columns[name][place], 2)

    def next_unknown(self, rows: Array) -> Array:
        """Returns true for terminated steps without a known next observation."""
        found: Array = self._flat["terminated"].take(rows) & (self._flat_final.take(rows) == NOTHING)
        return found

    def next_rows(self, rows: Array) -> Array:
        """Returns the next step in each row's episode, −1 if it ends or is unknown."""
        return self._flat_next.take(rows)

    def observations(self, rows: Array) -> Columns:
        """`obs…` that these steps were acted on."""
        where = rows + rows // self.rows_each * self.slots
        return {name: observed.take(where) for name, observed in self.observed.items()}

    def next_observations(self, rows: Array, *names: str) -> Columns:
        """`obs…` (or only these columns) that these steps led to; they mean nothing where `next_unknown`."""
        where, finals = rows + (rows // self.rows_each + 1) * self.slots, self._flat_final.take(rows)
        return {name: self.observed[name].take(where, finals) for name in names or self.observed}


def _flat(array: Array, axes: int) -> Array:
    return array.reshape(-1, *array.shape[axes:])
