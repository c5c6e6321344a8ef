"""The ring of fragments: preallocated columns, and for each step the row of the step that follows it.

With F fragments of T steps × S slots, a row is (fragment · T + step) · S + slot. Observations are stored once: those of
fragment f are steps 0 … T of `[F, T + 1, S, …]`, the last being what was observed after it; the true last observations
of episodes are in the pool of `FinalObservations`. Of stacked images each frame is stored once (`FrameStacks`).
"""

import numpy as np
import numpy.typing as npt

from shared.experience.fragment import expected_columns
from shared.experience.spaces import Array, Columns, PolicySpaces
from trainer_node.learning.replay_buffers.stacked_frames import NOBODY, FrameStacks, is_stacked, may_be_stacked

NOTHING = NOBODY
_MOST_ROWS = (1 << 31) - 1


class FragmentRing:
    """The newest fragments, in places 0 … F − 1 that are used in turn."""

    def __init__(self, spaces: PolicySpaces, steps: int, slots: int, fragments: int) -> None:
        rows = fragments * steps * slots
        if not 0 < rows <= _MOST_ROWS:
            raise ValueError(f"a replay buffer of {rows} transitions: there must be 1 to {_MOST_ROWS}")
        self.spaces, self.steps, self.slots, self.fragments = spaces, steps, slots, fragments
        self.rows_each = steps * slots
        expected = expected_columns(spaces, steps, slots)
        self._names = ("reward", "terminated", "truncated", "mask", *spaces.action.column_names("action"))
        self._columns = {name: np.zeros((fragments, *expected[name][0]), expected[name][1]) for name in self._names}
        leaves = {leaf.column("obs"): leaf for leaf in spaces.observation.leaves}
        self.stacks: dict[str, FrameStacks] = {}
        self._observations: Columns = {}
        self._finals = FinalObservations(fragments)
        for name, leaf in leaves.items():
            if may_be_stacked(leaf, steps):
                self.stacks[name] = FrameStacks(leaf.shape, steps, slots, fragments)
                self._finals.hold(name, leaf.shape[:1], np.int32)
            else:
                self._hold_whole(name, leaf.shape, leaf.column_dtype)
        self._stacked_for_sure = not self.stacks
        self._final = np.full((fragments, steps, slots), NOTHING, np.int32)
        self._next = np.full((fragments, steps, slots), NOTHING, np.int32)
        self.following = np.full(fragments, NOTHING, np.int64)
        """Place → place of the fragment that goes on where it ends, −1 where none is known."""
        self.preceding = np.full(fragments, NOTHING, np.int64)
        """The inverse of `following`, while that fragment is there."""
        self._newest: dict[str, int] = {}
        self.added = 0
        """Fragments so far."""
        self._flat = {name: _flat(array, 3) for name, array in (self._columns | self._observations).items()}
        self._flat_final, self._flat_next = self._final.reshape(-1), self._next.reshape(-1)

    def add(self, source: str, columns: Columns) -> int:
        """Puts a fragment's columns in, in place of the oldest once the ring is full; returns its place.

        `source` (worker and seed lineage) tells what may go on: it does so where its last fragment was left (equal
        observations in all slots).
        """
        if columns["reward"].shape != (self.steps, self.slots):
            raise ValueError(
                f"a fragment of {columns['reward'].shape} for a replay buffer of {(self.steps, self.slots)}"
            )
        place = self.added % self.fragments
        if not self._stacked_for_sure:
            self._keep_whole_what_is_not_stacked(columns)
        self._give_up(place)
        before = self._newest.get(source, NOTHING)
        if before != NOTHING and not self._ends_with(before, columns):
            before = NOTHING
        for name in self._names:
            self._columns[name][place] = columns[name]
        for name, array in self._observations.items():
            array[place, :-1], array[place, -1] = columns[name], columns[f"bootstrap_{name}"]
        where = columns["final_index"]
        finals = {f"final_{name}": columns[f"final_{name}"] for name in self._observations}
        for name, stacks in self.stacks.items():
            stacks.put(place, columns[name], columns[f"bootstrap_{name}"], before)
            finals[f"final_{name}"] = stacks.put_finals(place, columns[f"final_{name}"], where, before != NOTHING)
        self._final[place] = NOTHING
        self._final[place, where[:, 0], where[:, 1]] = self._finals.put(place, len(where), finals)
        self._link(place, before)
        self._newest[source] = place
        self.added += 1
        return place

    def resume(self, added: int, finals: int) -> int:
        """Empties the ring such that the fragments it held after `added` ones are put in again; returns how many."""
        self.added = max(0, added - self.fragments)
        self._finals.resume(finals)
        self._newest.clear()
        for stacks in self.stacks.values():
            stacks.pool.clear()
        self.following[:] = self.preceding[:] = self._next[...] = self._final[...] = NOTHING
        return added - self.added

    @property
    def finals(self) -> int:
        """For `resume`: last observations that are gone with their fragments."""
        return self._finals.begin

    def _give_up(self, place: int) -> None:
        """Forgets how the fragment in `place` hangs together with others."""
        self._newest = {source: where for source, where in self._newest.items() if where != place}
        after = self.following[place]
        for stacks in self.stacks.values():
            stacks.give_up(place, int(after))
        if after != NOTHING:
            self.preceding[after] = NOTHING
        self.following[place] = self.preceding[place] = NOTHING

    def _ends_with(self, place: int, columns: Columns) -> bool:
        """Whether the fragment in `place` ended with the observations that the one of `columns` begins with."""
        return all(
            np.array_equal(array[place, -1], columns[name][0]) for name, array in self._observations.items()
        ) and all(stacks.ends_with(place, columns[name][0]) for name, stacks in self.stacks.items())

    def _keep_whole_what_is_not_stacked(self, columns: Columns) -> None:
        """The first fragment tells stacked frames from what has but the shape of them (three colors, say)."""
        for name in [name for name in self.stacks if not is_stacked(columns[name])]:
            del self.stacks[name]
            self._hold_whole(name, columns[name].shape[2:], np.uint8)
            self._flat[name] = _flat(self._observations[name], 3)
        self._stacked_for_sure = True

    def _hold_whole(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self._observations[name] = np.zeros((self.fragments, self.steps + 1, self.slots, *shape), dtype)
        self._finals.hold(name, shape, dtype)

    def _link(self, place: int, before: int) -> None:
        """Which step follows which, within the fragment in `place` and from the one before it."""
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
        """Which of all the transitions that ever came in each row holds: never the same again, int64."""
        place, local = np.divmod(rows, self.rows_each)
        fragment = self.added - 1 - (self.added - 1 - place) % self.fragments
        found: Array = fragment * self.rows_each + local
        return found

    def column(self, name: str, rows: Array) -> Array:
        """`reward`, `terminated`, `truncated`, `mask` or `action…` of these rows (of any shape)."""
        return self._flat[name].take(rows, axis=0)

    def held(self, name: str, place: int) -> Array:
        """A whole column of the fragment in `place`, `[T · S, …]`; not to be written to."""
        return _flat(self._columns[name][place], 2)

    def next_unknown(self, rows: Array) -> Array:
        """Whether these steps terminated, and what they led to is not known."""
        found: Array = self._flat["terminated"].take(rows) & (self._flat_final.take(rows) == NOTHING)
        return found

    def next_rows(self, rows: Array) -> Array:
        """The step after each within its episode; −1 where the episode ends or no more of it is known."""
        return self._flat_next.take(rows)

    def observations(self, rows: Array) -> Columns:
        """`obs…` that these steps were acted on."""
        where = rows + rows // self.rows_each * self.slots
        names = self.spaces.observation.column_names("obs")
        return {name: self._frames_at(name, self._at(name, where)) for name in names}

    def next_observations(self, rows: Array, *names: str) -> Columns:
        """`obs…` (or only these columns) that these steps led to; they mean nothing where `next_unknown`."""
        where = rows + (rows // self.rows_each + 1) * self.slots
        names = names or self.spaces.observation.column_names("obs")
        found = {name: self._at(name, where) for name in names}
        number = self._flat_final.take(rows)
        cut = number != NOTHING
        if cut.any():
            for name, array in found.items():
                array[cut] = self._finals.take(name, number[cut])
        return {name: self._frames_at(name, array) for name, array in found.items()}

    def _at(self, name: str, where: Array) -> Array:
        """Observations, or of stacked ones their frames' addresses; `where` counts (fragment, step 0 … T, slot)."""
        stacks = self.stacks.get(name)
        return self._flat[name].take(where, axis=0) if stacks is None else stacks.addresses(where)

    def _frames_at(self, name: str, found: Array) -> Array:
        stacks = self.stacks.get(name)
        return found if stacks is None else stacks.frames(found)


def _flat(array: Array, axes: int) -> Array:
    return array.reshape(-1, *array.shape[axes:])


_NUMBERS = (1 << 31) - 1


class FinalObservations:
    """The true last observations of episodes that ended, `obs…`: few, in a pool of their own that grows as needed.

    Fragments leave the ring in the order in which they came, so the pool is a ring as well. An observation is known by
    its number since the start (its lowest 31 bits, which a resize does not change).
    """

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
        found: Array = self._columns[name][numbers & (self._size - 1)]
        return found
