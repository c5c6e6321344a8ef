"""Stacked frames, each stored once: the newest of every step, and for each stack where its frames lie
(docs/concepts/determinism.md). Whatever the data, a stack comes out as it went in, byte for byte.

The address of a frame is its row among the newest frames, or ~n for frame n of the pool. A fragment refers to its own
frames and to those of the fragment that it continues, and copies the latter when that fragment is removed.
"""

import itertools

import numpy as np

from stagecoach.shared.experience.spaces import Array, Leaf
from stagecoach.trainer_node.learning.replay_buffers.observation_column import NOTHING, ObservationColumn, RowPool

_MOST_FRAMES = 16


def may_be_stacked(leaf: Leaf, steps: int) -> bool:
    """Decides from the shape if an observation may be k stacked images worth splitting."""
    images = leaf.kind == "box" and leaf.dtype == "uint8" and len(leaf.shape) >= 3
    return images and 2 <= leaf.shape[0] <= min(_MOST_FRAMES, steps) and leaf.size >= 64 * leaf.shape[0]


def is_stacked(column: Array) -> bool:
    """Decides if at least half of the stacks `[T, S, k, …]` continue those of the previous step."""
    if len(column) < 2:
        return False
    same = [_goes_on(_words(before), _words(now)).mean() for before, now in itertools.pairwise(column)]
    return float(np.mean(same)) >= 0.5


class FrameStacks(ObservationColumn):
    """A column of stacks: what it holds of each are the addresses of its frames."""

    def __init__(self, shape: tuple[int, ...], steps: int, slots: int, fragments: int) -> None:
        """`shape`: of one stack, k frames; k is at most `steps`, so that what follows needs one fragment before it."""
        super().__init__(shape[:1], np.int32, steps, slots, fragments)
        self._stack, frame = shape[0], shape[1:]
        self._newest = np.zeros((fragments, slots, steps, *frame), np.uint8)
        """Newest frames of steps 1 … T, slot by slot, so that the frames of a stack are contiguous."""
        self._flat_newest = self._newest.reshape(-1, *frame)
        self.pool = RowPool(frame, np.uint8)

    def put(self, place: int, observed: Array, last: Array, before: int) -> None:
        steps, slots = observed.shape[:2]
        self._newest[place, :, :-1] = observed[1:, :, -1].swapaxes(0, 1)
        self._newest[place, :, -1] = last[:, -1]
        numbers = (place * slots + np.arange(slots)) * steps
        addresses = self._steps[place]
        if before == NOTHING:
            addresses[0] = [self._apart(place, stack) for stack in observed[0]]
        else:
            addresses[0] = self._steps[before, -1]
        earlier = _words(observed[0])
        for step in range(1, steps + 1):
            stack = observed[step] if step < steps else last
            now, address = _words(stack), addresses[step]
            address[:, :-1], address[:, -1] = addresses[step - 1, :, 1:], numbers + step - 1
            for slot in np.flatnonzero(~_goes_on(earlier, now)):
                address[slot] = self._apart(place, stack[slot], newest=int(address[slot, -1]))
            earlier = now

    def put_finals(self, place: int, finals: Array, where: Array, linked: bool) -> Array:
        """Stores stacks without references to the frames of the continued fragment."""
        found = np.empty(finals.shape[:2], np.int32)
        for row, (step, slot) in enumerate(where.tolist()):
            earlier = self._steps[place, step, slot, 1:]
            own = not linked or step >= self._stack - 1
            if own and np.array_equal(self._frames(earlier), finals[row, :-1]):
                found[row, :-1], found[row, -1] = earlier, self._put_apart(place, finals[row, -1:])[0]
            else:
                found[row] = self._apart(place, finals[row])
        return super().put_finals(place, found, where, linked)

    def give_up(self, place: int, after: int) -> None:
        """Copies the frames that the fragment in `after` refers to."""
        super().give_up(place, after)
        if after != NOTHING:
            old = self._steps[after, 0].copy()
            distinct, which = np.unique(old, return_inverse=True)
            new = self._put_apart(after, self._frames(distinct))[which].reshape(old.shape)
            for step in range(self._stack):
                part = self._steps[after, step, :, : self._stack - step]
                np.copyto(part, new[:, step:], where=part == old[:, step:])
        self.pool.give_up(place)

    def clear(self) -> None:
        super().clear()
        self.pool.clear()

    def ends_with(self, place: int, observed: Array) -> bool:
        return np.array_equal(self._frames(self._steps[place, -1]), observed)

    def take(self, where: Array, finals: Array | None = None) -> Array:
        return self._frames(super().take(where, finals))

    def _frames(self, addresses: Array) -> Array:
        found = self._flat_newest.take(np.maximum(addresses, 0), axis=0)
        apart = addresses < 0
        if apart.any():
            found[apart] = self.pool.take(~addresses[apart])
        return found

    def _put_apart(self, place: int, frames: Array) -> Array:
        """The addresses of frames `[n, …]` that go with the fragment in `place`."""
        return ~self.pool.put(place, frames)

    def _apart(self, place: int, stack: Array, newest: int | None = None) -> Array:
        """Returns addresses of a stack that continues none; equal neighboring frames share one."""
        found = np.empty(self._stack, np.int32)
        found[-1] = self._put_apart(place, stack[-1:])[0] if newest is None else newest
        for age in range(self._stack - 2, -1, -1):
            equal = np.array_equal(stack[age], stack[age + 1])
            found[age] = found[age + 1] if equal else self._put_apart(place, stack[age : age + 1])[0]
        return found


def _words(stacks: Array) -> Array:
    """`[S, k, …]` → `[S, k, n]`: bytes, or eight at a time where they come out even, which compares faster."""
    flat = np.ascontiguousarray(stacks).reshape(*stacks.shape[:2], -1)
    return flat.view(np.uint64) if flat.shape[2] % 8 == 0 else flat


def _goes_on(before: Array, now: Array) -> Array:
    same: Array = (now[:, :-1] == before[:, 1:]).all(axis=(1, 2))
    return same
