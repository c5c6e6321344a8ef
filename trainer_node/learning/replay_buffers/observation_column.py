"""One column of the observations in the ring: those of each step, and in a pool the true last ones of episodes."""

import numpy as np
import numpy.typing as npt

from stagecoach.shared.experience.spaces import Array

NOTHING = -1
"""No fragment, no step, no observation."""
_GROWTH = 8


class ObservationColumn:
    """Observations as they come: of steps 0 … T of each fragment, the last being what was observed after it."""

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike, steps: int, slots: int, fragments: int) -> None:
        self._steps = np.zeros((fragments, steps + 1, slots, *shape), dtype)
        self._flat_steps = self._steps.reshape(-1, *shape)
        self._finals = RowPool(shape, dtype)

    def put(self, place: int, observed: Array, last: Array, before: int) -> None:
        """Takes in a fragment's observations `[T, S, …]` and the `last` ones `[S, …]`.

        `before`: the place of the fragment that ended with the very ones that this one begins with, or `NOTHING`.
        """
        self._steps[place, :-1], self._steps[place, -1] = observed, last

    def put_finals(self, place: int, finals: Array, where: Array, linked: bool) -> Array:
        """Takes in what was observed after the steps and slots `where` `[M, 2]`; returns the numbers, for `take`.

        The fragment is in `place`; `linked`: it goes on with another.
        """
        return self._finals.put(place, finals)

    def give_up(self, place: int, after: int) -> None:
        """Forgets the fragment in `place`, which the one in `after` goes on with (or `NOTHING`)."""
        self._finals.give_up(place)

    def clear(self) -> None:
        """Forgets all fragments."""
        self._finals.clear()

    def ends_with(self, place: int, observed: Array) -> bool:
        """Whether the fragment in `place` ended with these observations `[S, …]`."""
        return np.array_equal(self._steps[place, -1], observed)

    def take(self, where: Array, finals: Array | None = None) -> Array:
        """Observations; `where` counts (fragment, step 0 … T, slot). In their place those of `finals` that are any."""
        found = self._flat_steps.take(where, axis=0)
        if finals is not None and (cut := finals != NOTHING).any():
            found[cut] = self._finals.take(finals[cut])
        return found


class RowPool:
    """Rows that are few, each owned by the fragment in some place, with which it goes; grows by need."""

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self.held = np.zeros((64, *shape), dtype)
        self._owned: dict[int, list[Array]] = {}
        self._free: list[int] = []
        self.clear()

    @property
    def used(self) -> int:
        """How many rows somebody owns."""
        return len(self.held) - len(self._free)

    def put(self, place: int, rows: Array) -> Array:
        """The numbers of these rows `[n, …]`, which the fragment in `place` owns from now on; int32."""
        while len(self._free) < len(rows):
            self._grow()
        numbers = np.array([self._free.pop() for _ in rows], np.int32)
        self.held[numbers] = rows
        self._owned.setdefault(place, []).append(numbers)
        return numbers

    def give_up(self, place: int) -> None:
        """What the fragment in `place` owned is free."""
        for numbers in reversed(self._owned.pop(place, [])):
            self._free.extend(numbers[::-1].tolist())

    def clear(self) -> None:
        self._owned.clear()
        self._free = list(range(len(self.held)))[::-1]

    def take(self, numbers: Array) -> Array:
        return self.held.take(numbers, axis=0)

    def _grow(self) -> None:
        """By a small part: it may be large where the data are not what they look like, and unused memory is wasted."""
        size = len(self.held)
        more = max(64, size // _GROWTH)
        self.held.resize((size + more, *self.held.shape[1:]), refcheck=False)  # in place, where the system can
        self._free.extend(range(size + more - 1, size - 1, -1))
