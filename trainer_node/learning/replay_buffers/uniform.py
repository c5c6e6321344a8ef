"""The uniform and the balanced replay buffer, and what all buffers have: n-step returns, and how they are restored.

How a buffer is restored: `state` after n fragments, `load_state` on a fresh buffer of the same size, then `add` with
the fragments it held, oldest first. They return to their places.
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
    """Rows that may be drawn, numbered class by class and within a class in the order of their places; four bytes a
    row. Absent agents' rows have no number. Numbers change as fragments come and go; rows do not."""

    def __init__(self, fragments: int, rows: int, classes: int) -> None:
        self._fragments, self._rows, self._classes = fragments, rows, classes
        self._order = np.zeros((fragments, rows), np.int32)
        self._starts = np.zeros((fragments, classes + 1), np.int32)
        self._before = np.zeros(classes * fragments + 1, np.int64)
        self._used = 0
        self._all = False
        """True if all rows of the used places are of one class, so that numbers are rows."""
        self.bounds = np.zeros(classes + 1, np.int64)
        """Class c has the numbers from `bounds[c]` to below `bounds[c + 1]`."""

    def put(self, place: int, classes: Array) -> None:
        """The rows of the fragment in `place` are of these classes `[rows]`; −1 for none."""
        order = np.argsort(classes, kind="stable").astype(np.int32)
        self._order[place] = order
        self._starts[place] = np.searchsorted(classes[order], np.arange(self._classes + 1))
        np.cumsum(np.diff(self._starts, axis=1).T, out=self._before[1:])
        self.bounds = self._before[:: self._fragments].copy()
        self._used = max(self._used, place + 1)
        self._all = self._classes == 1 and bool(self.bounds[-1] == self._used * self._rows)

    def rows(self, numbers: Array) -> Array:
        if self._all:
            return numbers
        cell = np.searchsorted(self._before, numbers, side="right") - 1
        which, place = np.divmod(cell, self._fragments)
        local = self._starts[place, which] + (numbers - self._before[cell])
        found: Array = place * self._rows + self._order[place, local]
        return found


class ReplayBuffer:
    """Draws uniformly; subclasses draw otherwise, or change what is drawn."""

    classes = 1
    """Number of classes of its transitions."""
    info_columns: tuple[str, ...] = ()
    """Names of the `info` columns that it stores."""

    def __init__(self, spaces: PolicySpaces, steps: int, slots: int, capacity: int) -> None:
        """Keeps the newest `capacity` transitions, rounded up to whole fragments of `steps` × `slots`."""
        self.fragments = max(1, -(-capacity // (steps * slots)))
        """Most fragments that it holds."""
        self.ring = FragmentRing(spaces, steps, slots, self.fragments, self.info_columns)
        self._index = RowIndex(self.fragments, self.ring.rows_each, self.classes)
        self._to_come = 0

    @property
    def has_priorities(self) -> bool:
        """Returns whether it needs TD errors, for which the trainer waits for the device."""
        return type(self).update_priorities is not ReplayBuffer.update_priorities

    @property
    def rows(self) -> int:
        """Number of rows, drawable or not: each row of a batch is less."""
        return self.fragments * self.ring.rows_each

    def __len__(self) -> int:
        return int(self._index.bounds[-1])

    def add(self, source: str, columns: Columns) -> None:
        """Adds a fragment (shared/experience/fragment.py) of `source` (worker, seed lineage), replacing the oldest."""
        place = self.ring.add(source, columns)
        self._index.put(place, np.where(self._drawable(place), self._classes_of(place), -1))
        self._placed(place)
        if self._to_come:
            self._to_come -= 1
        else:
            each = self.ring.rows_each
            self.added(slice(place * each, (place + 1) * each), self._drawable(place))

    def _drawable(self, place: int) -> Array:
        return self.ring.held("mask", place)

    def _classes_of(self, place: int) -> Array:
        """Returns the class of each row of a fragment, `[T · S]`: 0 … `classes` − 1."""
        return np.zeros(self.ring.rows_each, np.int64)

    def _placed(self, place: int) -> None:
        """Hook of subclasses for each fragment, new or restored."""

    def added(self, rows: slice, drawable: Array) -> None:
        """Hook of subclasses for each new fragment, in log order; a restore does not call it.

        Args:
            rows: the fragment's rows, which were the oldest fragment's before.
            drawable: `[rows]`: those of them that may be drawn; absent agents' may not.
        """

    def sample(
        self, count: int, generator: np.random.Generator, *, gamma: float, n_step: int = 1, beta: float = 1.0,
        as_now: Rewards | None = None,
    ) -> Batch:  # fmt: skip
        """Draws `count` transitions over up to `n_step` known steps of an episode.

        Truncation bootstraps from the true last observation, termination does not. `beta` is the exponent of the
        importance weights of prioritized buffers; `as_now` rescales rewards.
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
        """Relabels steps `[n, B]` in place; returns column → rows of the batch, and their new goals or actions."""
        return {}

    def update_priorities(self, rows: Array, td_errors: Array) -> None:
        """Updates the priorities of these rows of a batch; buffers without priorities do not override it."""

    def value_bounds(self, gamma: float) -> tuple[float, float] | None:
        """Returns the least and greatest possible value of a transition; None if unknown."""
        return None

    def state(self) -> Columns:
        """Returns the state that does not follow from the held fragments; valid during a restore too."""
        return {"added": np.array(self._ever_added), "finals": np.array(self.ring.finals)}

    @property
    def _ever_added(self) -> int:
        return self.ring.added + self._to_come

    def load_state(self, arrays: Columns) -> None:
        """Restores `state`; the held fragments must be added again before the next draw."""
        self._to_come = self.ring.resume(int(arrays["added"]), int(arrays["finals"]))
        self._index = RowIndex(self.fragments, self.ring.rows_each, self.classes)

    def forget(self) -> None:
        """Empties it; fragments that are added from now on are new to it."""
        self.load_state(self.state() | self._emptied())

    def _emptied(self) -> Columns:
        """Returns the fields of `state` that describe held fragments, for an empty buffer."""
        return {"added": np.array(0), "finals": np.array(0)}

    def draw(self, count: int, generator: np.random.Generator, beta: float) -> tuple[Array, Array]:
        """Draws rows of `count` transitions and their loss weights (float32), both `[B]`.

        It may depend on its arguments and the added fragments alone.
        """
        self._refuse_if_empty()
        return self._index.rows(generator.integers(len(self), size=count)), np.ones(count, np.float32)

    def _refuse_if_empty(self) -> None:
        if self._to_come:
            raise RuntimeError(f"{self._to_come} of the fragments that this replay buffer held have not been put back")
        if not len(self):
            raise RuntimeError("nothing to draw: this replay buffer is empty")

    def _paths(self, rows: Array, length: int) -> tuple[Array, Array]:
        """Returns the rows that follow from each of `rows` and which of them exist, both `[length, B]`."""
        path, valid = np.empty((length, len(rows)), np.int64), np.ones((length, len(rows)), np.bool_)
        path[0] = rows
        for step in range(1, length):
            after = self.ring.next_rows(path[step - 1])
            valid[step] = after != NOTHING
            path[step] = np.where(valid[step], after, path[step - 1])
        return path, valid


class BalancedReplayBuffer(ReplayBuffer):
    """Draws the same number of each present class, to within one, and uniformly within a class (Coach's
    BalancedExperienceReplay), for rare kinds such as sparse rewards. The loss is not reweighted."""

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
    `sample(count)` returns `count` · A rows, agent by agent; `weight` is 0 for those of absent agents, otherwise 1."""

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
    """Returns the discounted reward of the valid steps and the discount after them, `[B]`, from `[n, B]`."""
    if len(reward) == 1:
        return reward[0], np.float32(gamma) * ~terminated
    factor = (gamma ** np.arange(len(reward) + 1)).astype(np.float32)
    return (reward * valid * factor[:-1, None]).sum(axis=0), factor[valid.sum(axis=0)] * ~terminated
