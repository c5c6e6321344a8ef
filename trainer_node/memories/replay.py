"""The uniform replay memory, and what all memories have: n-step returns, sequences, and how they are restored.

Comes in: a fragment's columns at a time. Goes out: a `Batch`, drawn with a generator of the caller's, so that equal
contents and equal generators make equal batches.

How a memory is restored: `state` after n fragments, `load_state` on a fresh memory of the same size, then `add` with
the fragments it held, oldest first. They come to lie where they lay, and nothing else moves.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shared.spaces import Array, Columns, PolicySpaces
from trainer_node.memories.batch import Batch, Sequences
from trainer_node.memories.ring import NOTHING, FragmentRing
from trainer_node.memories.row_index import RowIndex

Rewards = Callable[[Array], Array]
"""Rewards of any shape, as the environment gave them → as they count by now."""


class ReplayMemory:
    """Draws uniformly; subclasses draw otherwise, or change what is drawn."""

    classes = 1
    """Into how many classes its transitions fall."""
    has_priorities = False
    """Whether it wants to know how wrong predictions were, for which the device has to be waited for."""

    def __init__(self, spaces: PolicySpaces, steps: int, slots: int, capacity: int) -> None:
        """For fragments of `steps` × `slots`; the newest `capacity` transitions stay, rounded up to whole fragments."""
        fragments = max(1, -(-capacity // (steps * slots)))
        self.ring = FragmentRing(spaces, steps, slots, fragments)
        self._index = RowIndex(fragments, self.ring.rows_each, self.classes)
        self._to_come = 0

    @property
    def fragments(self) -> int:
        """How many fragments it holds when it is full."""
        return self.ring.fragments

    def __len__(self) -> int:
        """Transitions that may be drawn."""
        return int(self._index.bounds[-1])

    def add(self, source: str, columns: Columns) -> None:
        """Takes in a fragment (shared/fragment.py) of `source`, worker and life; the oldest may have to go."""
        place = self.ring.add(source, columns)
        self._index.put(place, np.where(self.ring.held("mask", place), self._classes_of(place), -1))
        self._placed(place)
        if self._to_come:
            self._to_come -= 1
        else:
            self._added(place)

    def _classes_of(self, place: int) -> Array:
        """Of the rows of a fragment, `[T · S]`: 0 … `classes` − 1."""
        return np.zeros(self.ring.rows_each, np.int64)

    def _placed(self, place: int) -> None:
        """What a subclass notes of a fragment, be it new or put back."""

    def _added(self, place: int) -> None:
        """What a subclass does about a new fragment only."""

    def sample(
        self,
        count: int,
        generator: np.random.Generator,
        *,
        gamma: float,
        n_step: int = 1,
        beta: float = 1.0,
        as_now: Rewards | None = None,
    ) -> Batch:
        """`count` transitions over up to `n_step` steps of an episode; ends of what is known cut them short.

        After termination nothing is bootstrapped, after truncation from the true last observation. `beta` is the
        exponent of importance weights, where there are priorities; `as_now` says what rewards count as by now.
        """
        rows, weight = self._draw(count, generator, beta)
        path, valid = self._paths(rows, n_step)
        reward, terminated = self.ring.column("reward", path), self.ring.column("terminated", path[-1])
        reward = reward if as_now is None else as_now(reward)
        return self._batch(rows, path[-1], discounted(reward, valid, terminated, gamma), weight)

    def _batch(self, rows: Array, last: Array, outcome: tuple[Array, Array], weight: Array) -> Batch:
        """`rows` and `last` `[B]`: of the first and the last step of each; `outcome`: reward and discount."""
        ring = self.ring
        return Batch(
            ring.observations(rows),
            {name: ring.column(name, rows) for name in ring.spaces.action.column_names("action")},
            ring.next_observations(last), *outcome, ring.column("log_prob", rows), weight, rows,
        )  # fmt: skip

    def sample_sequences(self, count: int, length: int, generator: np.random.Generator) -> Sequences:
        """`count` sequences of up to `length` steps of an episode, beginning at steps drawn as `sample` draws them."""
        rows, _ = self._draw(count, generator, 1.0)
        path, valid = self._paths(rows, length)
        ring = self.ring
        return Sequences(
            ring.observations(path),
            {name: ring.column(name, path) for name in ring.spaces.action.column_names("action")},
            ring.next_observations(path),
            ring.column("reward", path), ring.column("terminated", path), ring.column("truncated", path),
            ring.column("log_prob", path), valid, path,
        )  # fmt: skip

    def update_priorities(self, rows: Array, td_errors: Array) -> None:
        """Tells a memory with priorities how wrong the predictions of these rows of a batch were."""

    def state(self) -> Columns:
        """All that the fragments themselves don't tell; the same while they have yet to be put back."""
        return {"added": np.array(self._ever_added), "finals": np.array(self.ring.finals)}

    @property
    def _ever_added(self) -> int:
        return self.ring.added + self._to_come

    def load_state(self, arrays: Columns) -> None:
        """The inverse of `state`, before the fragments that were held are added again; it draws nothing until then."""
        self._to_come = self.ring.resume(int(arrays["added"]), int(arrays["finals"]))
        self._index = RowIndex(self.fragments, self.ring.rows_each, self.classes)

    def _draw(self, count: int, generator: np.random.Generator, beta: float) -> tuple[Array, Array]:
        """Rows `[count]` and their weights."""
        self._refuse_if_empty()
        return self._index.rows(generator.integers(len(self), size=count)), np.ones(count, np.float32)

    def _refuse_if_empty(self) -> None:
        if self._to_come:
            raise RuntimeError(f"{self._to_come} of the fragments that this memory held have not been put back")
        if not len(self):
            raise RuntimeError("nothing to draw: this memory is empty")

    def _paths(self, rows: Array, length: int) -> tuple[Array, Array]:
        """`[length, B]`: the rows that follow each other from each of `rows`, and which of them there are."""
        path, valid = np.empty((length, len(rows)), np.int64), np.ones((length, len(rows)), np.bool_)
        path[0] = rows
        for step in range(1, length):
            after = self.ring.next_rows(path[step - 1])
            valid[step] = after != NOTHING
            path[step] = np.where(valid[step], after, path[step - 1])
        return path, valid


def discounted(reward: Array, valid: Array, terminated: Array, gamma: float) -> tuple[Array, Array]:
    """Sum of the rewards of the valid steps, and discount of what follows, `[B]`; reward and valid are `[n, B]`."""
    if len(reward) == 1:
        return reward[0], np.float32(gamma) * ~terminated
    factor = (gamma ** np.arange(len(reward) + 1)).astype(np.float32)
    return (reward * valid * factor[:-1, None]).sum(axis=0), factor[valid.sum(axis=0)] * ~terminated
