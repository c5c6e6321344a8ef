"""Balanced replay: each class of transitions that there is has an equal share of every batch, however rare it is.

For data in which most is of one kind: the brake among the actions of a driver, a reward among thousands of steps
without. (Coach's BalancedExperienceReplay.) Nothing is corrected for: the distribution that is learnt from is the
balanced one.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from shared.errors import ConfigError
from shared.spaces import Array, PolicySpaces
from trainer_node.memories.replay import ReplayMemory

Classes = Literal["action", "reward_sign"]


class BalancedMemory(ReplayMemory):
    """Draws the same number of each class, to within one; within a class uniformly."""

    def __init__(self, spaces: PolicySpaces, steps: int, slots: int, capacity: int, *, classes: Classes) -> None:
        self._by_action = classes == "action"
        self.classes = _choices(spaces) if self._by_action else 3
        super().__init__(spaces, steps, slots, capacity)

    def _classes_of(self, place: int) -> Array:
        if self._by_action:
            return self.ring.held("action", place)
        return np.sign(self.ring.held("reward", place)).astype(np.int64) + 1

    def _draw(self, count: int, generator: np.random.Generator, beta: float) -> tuple[Array, Array]:
        self._refuse_if_empty()
        sizes = np.diff(self._index.bounds)
        there = np.flatnonzero(sizes)
        which = there[(generator.integers(len(there)) + np.arange(count)) % len(there)]
        numbers = self._index.bounds[which] + (generator.random(count) * sizes[which]).astype(np.int64)
        return self._index.rows(numbers), np.ones(count, np.float32)


def _choices(spaces: PolicySpaces) -> int:
    leaves = spaces.action.leaves
    if [leaf.kind for leaf in leaves] != ["discrete"] or leaves[0].path:
        raise ConfigError(
            f"a balanced memory with classes=action needs one discrete action, found "
            f"{[leaf.kind for leaf in leaves]}; use classes=reward_sign"
        )
    return leaves[0].nvec[0]
