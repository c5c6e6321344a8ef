"""The uniform and the balanced replay buffer, and what all buffers have: n-step returns, and how they are restored.

How a buffer is restored: `state` after n fragments, `load_state` on a fresh buffer of the same size, then `add` with
the fragments it held, oldest first. They come to lie where they lay, and nothing else moves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.experience.spaces import Array, Columns, PolicySpaces
from stagecoach.trainer_node.learning.replay_buffers.observation_column import NOTHING
from stagecoach.trainer_node.learning.replay_buffers.storage import FragmentRing

Classes = Literal["action", "reward_sign"]
Rewards = Callable[[Array], Array]
"""Rewards of any shape, as the environment gave them → as they count by now."""


@dataclass(frozen=True)
class Batch:
    """B transitions as NumPy columns, each over n steps or fewer."""

    observations: Columns
    """`obs…` `[B, …]`."""
    actions: Columns
    """`action…` `[B, …]`."""
    next_observations: Columns
    """`obs…` `[B, …]`: what is bootstrapped from. Where `discount` is 0, what was observed last, or without meaning if
    that is not known (shared/experience/fragment.py)."""
    reward: Array
    """`[B]`, float32: the discounted sum over the steps."""
    discount: Array
    """`[B]`, float32: gamma to the number of steps; 0 after termination."""
    weight: Array
    """`[B]`, float32: of each transition in the loss; 1 unless drawn by priority."""
    row: Array
    """`[B]`, int64: where each lies in the buffer, for `update_priorities`."""


class RowIndex:
    """The rows that may be drawn, numbered class by class and within a class in the order of their places.

    Of `fragments` places with `rows` rows each; four bytes a row. Absent agents' rows have no number. Numbers change as
    fragments come and go; rows do not.
    """

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
        cell = np.searchsorted(self._before, numbers, side="right") - 1
        which, place = np.divmod(cell, self._fragments)
        local = self._starts[place, which] + (numbers - self._before[cell])
        found: Array = place * self._rows + self._order[place, local]
        return found


class ReplayBuffer:
    """Draws uniformly; subclasses draw otherwise, or change what is drawn."""

    classes = 1
    """Into how many classes its transitions fall."""
    info_columns: tuple[str, ...] = ()
    """Numbers of the `info` that it keeps."""
    has_priorities = False
    """Whether it wants to know how wrong predictions were, for which the device has to be waited for."""

    def __init__(self, spaces: PolicySpaces, steps: int, slots: int, capacity: int) -> None:
        """For fragments of `steps` × `slots`; the newest `capacity` transitions stay, rounded up to whole fragments."""
        self.fragments = max(1, -(-capacity // (steps * slots)))
        """How many fragments it holds when it is full."""
        self.ring = FragmentRing(spaces, steps, slots, self.fragments, self.info_columns)
        self._index = RowIndex(self.fragments, self.ring.rows_each, self.classes)
        self._to_come = 0

    def __len__(self) -> int:
        return int(self._index.bounds[-1])

    def add(self, source: str, columns: Columns) -> None:
        """Takes in a fragment (shared/experience/fragment.py) of `source` (worker, seed lineage); the oldest may go."""
        place = self.ring.add(source, columns)
        self._index.put(place, np.where(self._drawable(place), self._classes_of(place), -1))
        self._placed(place)
        if self._to_come:
            self._to_come -= 1
        else:
            self._added(place)

    def _drawable(self, place: int) -> Array:
        """Of the rows of a fragment, `[T · S]`: which may be drawn."""
        return self.ring.held("mask", place)

    def _classes_of(self, place: int) -> Array:
        """Of the rows of a fragment, `[T · S]`: 0 … `classes` − 1."""
        return np.zeros(self.ring.rows_each, np.int64)

    def _placed(self, place: int) -> None:
        """What a subclass notes of a fragment, be it new or put back."""

    def _added(self, place: int) -> None:
        """What a subclass does about a new fragment only."""

    def sample(
        self, count: int, generator: np.random.Generator, *, gamma: float, n_step: int = 1, beta: float = 1.0,
        as_now: Rewards | None = None,
    ) -> Batch:  # fmt: skip
        """`count` transitions over up to `n_step` steps of an episode; ends of what is known cut them short.

        After termination nothing is bootstrapped, after truncation from the true last observation. `beta` is the
        exponent of importance weights, where there are priorities; `as_now` says what rewards count as by now.
        """
        ring, (rows, weight) = self.ring, self.draw(count, generator, beta)
        path, valid = self._paths(rows, n_step)
        reward, over = ring.column("reward", path), ring.column("terminated", path)
        changed = self._relabeled(generator, path, valid, reward, over)
        reward = reward if as_now is None else as_now(reward)
        depth, columns = valid.sum(axis=0) - 1, np.arange(len(rows))
        last = path[depth, columns]
        actions = {name: ring.column(name, rows) for name in ring.spaces.action.column_names("action")}
        outcome = discounted(reward, valid, over[depth, columns], gamma)
        batch = Batch(ring.observations(rows), actions, ring.next_observations(last), *outcome, weight, rows)
        for name, (which, new) in changed.items():
            for part in (batch.actions,) if name in actions else (batch.observations, batch.next_observations):
                part[name][which] = new
        return batch

    def _relabeled(
        self, generator: np.random.Generator, path: Array, valid: Array, reward: Array, over: Array
    ) -> dict[str, tuple[Array, Array]]:
        """Changes steps `[n, B]` to be learned under other goals: name → which of the batch, and goals (or actions)."""
        return {}

    def update_priorities(self, rows: Array, td_errors: Array) -> None:
        """Tells a buffer with priorities how wrong the predictions of these rows of a batch were."""

    def value_bounds(self, gamma: float) -> tuple[float, float] | None:
        """Least and greatest value that any transition can have; None where unknown."""
        return None

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

    def draw(self, count: int, generator: np.random.Generator, beta: float) -> tuple[Array, Array]:
        """The rows of `count` transitions, and the weight of each in the loss (float32): `[B]` both. It may depend on
        nothing but its arguments and what was added."""
        self._refuse_if_empty()
        return self._index.rows(generator.integers(len(self), size=count)), np.ones(count, np.float32)

    def _refuse_if_empty(self) -> None:
        if self._to_come:
            raise RuntimeError(f"{self._to_come} of the fragments that this replay buffer held have not been put back")
        if not len(self):
            raise RuntimeError("nothing to draw: this replay buffer is empty")

    def _paths(self, rows: Array, length: int) -> tuple[Array, Array]:
        """`[length, B]`: the rows that follow each other from each of `rows`, and which of them there are."""
        path, valid = np.empty((length, len(rows)), np.int64), np.ones((length, len(rows)), np.bool_)
        path[0] = rows
        for step in range(1, length):
            after = self.ring.next_rows(path[step - 1])
            valid[step] = after != NOTHING
            path[step] = np.where(valid[step], after, path[step - 1])
        return path, valid


class BalancedReplayBuffer(ReplayBuffer):
    """Draws the same number of each class that there is, to within one, however rare it is; within a class uniformly.

    For data in which most is of one kind: the brake among the actions of a driver, a reward among thousands of steps
    without (Coach's BalancedExperienceReplay). Nothing is corrected for: the balanced distribution is learned from.
    """

    def __init__(self, spaces: PolicySpaces, steps: int, slots: int, capacity: int, *, classes: Classes) -> None:
        self._by_action, self.classes, leaves = classes == "action", 3, spaces.action.leaves
        if self._by_action:
            if [leaf.kind for leaf in leaves] != ["discrete"] or leaves[0].path:
                needed = "a balanced replay buffer with classes=action needs one discrete action"
                raise ConfigError(f"{needed}, found {[leaf.kind for leaf in leaves]}; use classes=reward_sign")
            (self.classes,) = leaves[0].nvec
        super().__init__(spaces, steps, slots, capacity)

    def _classes_of(self, place: int) -> Array:
        if self._by_action:
            return self.ring.held("action", place)
        return np.sign(self.ring.held("reward", place)).astype(np.int64) + 1

    def draw(self, count: int, generator: np.random.Generator, beta: float) -> tuple[Array, Array]:
        self._refuse_if_empty()
        sizes = np.diff(self._index.bounds)
        there = np.flatnonzero(sizes)
        which = there[(generator.integers(len(there)) + np.arange(count)) % len(there)]
        numbers = self._index.bounds[which] + (generator.random(count) * sizes[which]).astype(np.int64)
        return self._index.rows(numbers), np.ones(count, np.float32)


class TeamReplayBuffer(ReplayBuffer):
    """Draws joint transitions: those of all A agents of one environment at one step in which any of them acted.

    `sample(count)` returns `count` · A rows, agent by agent; `weight` is 0 for those of absent agents, otherwise 1.
    """

    def __init__(self, spaces: PolicySpaces, steps: int, slots: int, capacity: int, *, agents: int) -> None:
        self._team = np.arange(agents) * (slots // agents)
        super().__init__(spaces, steps, slots, capacity)

    def _drawable(self, place: int) -> Array:
        """A joint transition stands where its first agent's does."""
        there = self.ring.held("mask", place).reshape(self.ring.steps, len(self._team), -1)
        first = np.zeros_like(there)
        first[:, 0] = there.any(axis=1)
        return first.reshape(-1)

    def draw(self, count: int, generator: np.random.Generator, beta: float) -> tuple[Array, Array]:
        first, _ = super().draw(count, generator, beta)
        rows = (first[:, np.newaxis] + self._team).reshape(-1)
        return rows, self.ring.column("mask", rows).astype(np.float32)


def discounted(reward: Array, valid: Array, terminated: Array, gamma: float) -> tuple[Array, Array]:
    """Sum of the rewards of the valid steps, and discount of what follows, `[B]`; reward and valid are `[n, B]`."""
    if len(reward) == 1:
        return reward[0], np.float32(gamma) * ~terminated
    factor = (gamma ** np.arange(len(reward) + 1)).astype(np.float32)
    return (reward * valid * factor[:-1, None]).sum(axis=0), factor[valid.sum(axis=0)] * ~terminated
