"""One observation column of the ring: each step's observation, and a pool of episodes' true last observations."""

import numpy as np
import numpy.typing as npt

from stagecoach.shared.experience.spaces import Array

NOTHING = -1
"""No fragment, no step, no observation."""
_GROWTH = 8


class ObservationColumn:
    """Plain observations of steps 0 … T of each fragment, step T being the bootstrap observation."""

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike, steps: int, slots: int, fragments: int) -> None:
        self._steps = np.zeros((fragments, steps + 1, slots, *shape), dtype)
        self._flat_steps = self._steps.reshape(-1, *shape)
        self._finals = RowPool(shape, dtype)

    def put(self, place: int, observed: Array, last: Array, before: int) -> None:
        """Stores a fragment's observations `[T, S, …]` and the `last` observations `[S, …]`. `before`: the place of the
        fragment that it continues, or `NOTHING`."""
        self._steps[place, :-1], self._steps[place, -1] = observed, last

    def put_finals(self, place: int, finals: Array, where: Array, linked: bool) -> Array:
        """Stores the last observations after the steps and slots `where` `[M, 2]`; returns their numbers, for `take`.
        `linked`: the fragment in `place` continues another."""
        return self._finals.put(place, finals)

    def give_up(self, place: int, after: int) -> None:
        """Removes the fragment in `place`, which the fragment in `after` continues (or `NOTHING`)."""
        self._finals.give_up(place)

    def clear(self) -> None:
        self._finals.clear()

    def ends_with(self, place: int, observed: Array) -> bool:
        """Compares the last observations of the fragment in `place` with `observed` `[S, …]`."""
        return np.array_equal(self._steps[place, -1], observed)

    def take(self, where: Array, finals: Array | None = None) -> Array:
        """Returns observations; `where` counts (fragment, step 0 … T, slot). Valid `finals` replace theirs."""
        found = self._flat_steps.take(where, axis=0)
        if finals is not None and (cut := finals != NOTHING).any():
            found[cut] = self._finals.take(finals[cut])
        return found


class RowPool:
    """A growing pool of rows, each removed with the fragment that owns it."""

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self.held = np.zeros((64, *shape), dtype)
        self._owned: dict[int, list[Array]] = {}
        self._free: list[int] = []
        self.clear()

    @property
    def used(self) -> int:
        return len(self.held) - len(self._free)

    def put(self, place: int, rows: Array) -> Array:
        """Stores rows `[n, …]` for the fragment in `place`; returns their numbers, int32."""
        while len(self._free) < len(rows):
            self._grow()
        numbers = np.array([self._free.pop() for _ in rows], np.int32)
        self.held[numbers] = rows
        self._owned.setdefault(place, []).append(numbers)
        return numbers

    def give_up(self, place: int) -> None:
        for numbers in reversed(self._owned.pop(place, [])):
            self._free.extend(numbers[::-1].tolist())

    def clear(self) -> None:
        self._owned.clear()
        self._free = list(range(len(self.held)))[::-1]

    def take(self, numbers: Array) -> Array:
        return self.held.take(numbers, axis=0)

    def _grow(self) -> None:
        """Grows by a small part, since a pool of unstacked images can be large."""
        size = len(self.held)
        more = max(64, size // _GROWTH)
        self.held.resize((size + more, *self.held.shape[1:]), refcheck=False)  # in place, where the system can
        self._free.extend(range(size + more - 1, size - 1, -1))
