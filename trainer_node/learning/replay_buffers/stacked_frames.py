"""Stacked frames, each stored once: the newest of every step, and for each stack where its frames lie.

In an observation of k stacked byte images all but the newest usually are those of the step before, and a fragment
usually begins with the stack that the one before it ended with. Where that is so (it is compared, not believed), a
stack refers to frames that are there already; where it is not (a reset, a lost fragment), its other frames go into a
pool that grows by need. So whatever the data, a stack comes out as it went in, byte for byte.

The address of a frame is its row among the newest frames, or ~n for frame n of the pool. A fragment refers to its own
frames and to those of the fragment that it goes on with; when that one leaves, it takes over what it refers to.
"""

import itertools

import numpy as np

from shared.experience.spaces import Array, Leaf

NOBODY = -1
"""The place of no fragment."""
_MOST_FRAMES = 16
_GROWTH = 8


def may_be_stacked(leaf: Leaf, steps: int) -> bool:
    """Whether an observation looks like k stacked images, and fragments of so many steps are worth taking it apart."""
    images = leaf.kind == "box" and leaf.dtype == "uint8" and len(leaf.shape) >= 3
    return images and 2 <= leaf.shape[0] <= min(_MOST_FRAMES, steps) and leaf.size >= 64 * leaf.shape[0]


def is_stacked(column: Array) -> bool:
    """Whether at least half of the stacks `[T, S, k, …]` go on with those of the step before."""
    if len(column) < 2:
        return False
    same = [_goes_on(_words(before), _words(now)).mean() for before, now in itertools.pairwise(column)]
    return float(np.mean(same)) >= 0.5


class FrameStacks:
    """The stacks of one observation: of steps 0 … T of each fragment, the last being what was observed after it."""

    def __init__(self, shape: tuple[int, ...], steps: int, slots: int, fragments: int) -> None:
        """`shape`: of one stack, k frames; k is at most `steps`, so that what follows needs one fragment before it."""
        self._stack, frame = shape[0], shape[1:]
        self._newest = np.zeros((fragments, slots, steps, *frame), np.uint8)
        """Of steps 1 … T, slot by slot, so that the frames of a stack lie side by side."""
        self._addresses = np.zeros((fragments, steps + 1, slots, self._stack), np.int32)
        self._flat_newest = self._newest.reshape(-1, *frame)
        self._flat_addresses = self._addresses.reshape(-1, shape[0])
        self.pool = FramePool(frame)

    def put(self, place: int, stacks: Array, last: Array, before: int) -> None:
        """Takes in the stacks `[T, S, k, …]` of a fragment, and the `last` ones `[S, k, …]`.

        `before`: the place of the fragment that ended with the very stacks that this one begins with, or `NOBODY`.
        """
        steps, slots = stacks.shape[:2]
        self._newest[place, :, :-1] = stacks[1:, :, -1].swapaxes(0, 1)
        self._newest[place, :, -1] = last[:, -1]
        numbers = (place * slots + np.arange(slots)) * steps
        addresses = self._addresses[place]
        if before == NOBODY:
            addresses[0] = [self._apart(place, stack) for stack in stacks[0]]
        else:
            addresses[0] = self._addresses[before, -1]
        earlier = _words(stacks[0])
        for step in range(1, steps + 1):
            stack = stacks[step] if step < steps else last
            now, address = _words(stack), addresses[step]
            address[:, :-1], address[:, -1] = addresses[step - 1, :, 1:], numbers + step - 1
            for slot in np.flatnonzero(~_goes_on(earlier, now)):
                address[slot] = self._apart(place, stack[slot], newest=int(address[slot, -1]))
            earlier = now

    def put_finals(self, place: int, stacks: Array, where: Array, linked: bool) -> Array:
        """The addresses `[M, k]` of stacks `[M, k, …]` that were observed after the steps and slots `where` `[M, 2]`.

        The fragment is in `place`; `linked`: it goes on with another, whose frames are not referred to from here.
        """
        found = np.empty(stacks.shape[:2], np.int32)
        for row, (step, slot) in enumerate(where.tolist()):
            earlier = self._addresses[place, step, slot, 1:]
            own = not linked or step >= self._stack - 1
            if own and np.array_equal(self.frames(earlier), stacks[row, :-1]):
                found[row, :-1], found[row, -1] = earlier, self.pool.put(place, stacks[row, -1:])[0]
            else:
                found[row] = self._apart(place, stacks[row])
        return found

    def give_up(self, place: int, after: int) -> None:
        """Forgets the fragment in `place`; the one in `after`, which goes on with it (or `NOBODY`), takes over."""
        if after != NOBODY:
            old = self._addresses[after, 0].copy()
            distinct, which = np.unique(old, return_inverse=True)
            new = self.pool.put(after, self.frames(distinct))[which].reshape(old.shape)
            for step in range(self._stack):
                part = self._addresses[after, step, :, : self._stack - step]
                np.copyto(part, new[:, step:], where=part == old[:, step:])
        self.pool.give_up(place)

    def ends_with(self, place: int, stacks: Array) -> bool:
        """Whether the fragment in `place` ended with these stacks `[S, k, …]`."""
        return np.array_equal(self.frames(self._addresses[place, -1]), stacks)

    def addresses(self, where: Array) -> Array:
        """Of the stacks' frames, `[…, k]`; `where` counts stacks as (fragment, step 0 … T, slot)."""
        return self._flat_addresses.take(where, axis=0)

    def frames(self, addresses: Array) -> Array:
        found = self._flat_newest.take(np.maximum(addresses, 0), axis=0)
        apart = addresses < 0
        if apart.any():
            found[apart] = self.pool.take(addresses[apart])
        return found

    def _apart(self, place: int, stack: Array, newest: int | None = None) -> Array:
        """Addresses of a stack that goes on with nothing; a frame that equals the next newer one shares its place."""
        found = np.empty(self._stack, np.int32)
        found[-1] = self.pool.put(place, stack[-1:])[0] if newest is None else newest
        for age in range(self._stack - 2, -1, -1):
            equal = np.array_equal(stack[age], stack[age + 1])
            found[age] = found[age + 1] if equal else self.pool.put(place, stack[age : age + 1])[0]
        return found


class FramePool:
    """Frames that lie apart, each owned by the fragment in some place, with which it goes. Addresses are ~n."""

    def __init__(self, frame: tuple[int, ...]) -> None:
        self.held = np.zeros((64, *frame), np.uint8)
        self._owned: dict[int, list[Array]] = {}
        self._free: list[int] = []
        self.clear()

    @property
    def used(self) -> int:
        """How many frames somebody owns."""
        return len(self.held) - len(self._free)

    def put(self, place: int, frames: Array) -> Array:
        """The addresses of these frames `[n, …]`, which the fragment in `place` owns from now on; int32."""
        while len(self._free) < len(frames):
            self._grow()
        numbers = np.array([self._free.pop() for _ in frames], np.int32)
        self.held[numbers] = frames
        self._owned.setdefault(place, []).append(numbers)
        return ~numbers

    def give_up(self, place: int) -> None:
        """What the fragment in `place` owned is free."""
        for numbers in reversed(self._owned.pop(place, [])):
            self._free.extend(numbers[::-1].tolist())

    def clear(self) -> None:
        self._owned.clear()
        self._free = list(range(len(self.held)))[::-1]

    def take(self, addresses: Array) -> Array:
        return self.held.take(~addresses, axis=0)

    def _grow(self) -> None:
        """By a small part: it may be large where the data are not what they look like, and unused memory is wasted."""
        size = len(self.held)
        more = max(64, size // _GROWTH)
        self.held.resize((size + more, *self.held.shape[1:]), refcheck=False)  # in place, where the system can
        self._free.extend(range(size + more - 1, size - 1, -1))


def _words(stacks: Array) -> Array:
    """`[S, k, …]` → `[S, k, n]`: bytes, or eight at a time where they come out even, which compares faster."""
    flat = np.ascontiguousarray(stacks).reshape(*stacks.shape[:2], -1)
    return flat.view(np.uint64) if flat.shape[2] % 8 == 0 else flat


def _goes_on(before: Array, now: Array) -> Array:
    same: Array = (now[:, :-1] == before[:, 1:]).all(axis=(1, 2))
    return same
