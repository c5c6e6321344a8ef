"""Prioritised replay (Schaul et al. 2016), the proportional kind: P(i) ∝ (|δ_i| + ε)^α.

A batch is stratified: one transition from each of B equal parts of the total. Its importance weights (N · P(i))^−β are
divided by the largest of the batch. A new transition gets the largest priority there has been so far (1 at first), so
that it is soon drawn.
"""

from __future__ import annotations

import numpy as np

from shared.spaces import Array, Columns, PolicySpaces
from trainer_node.memories.replay import ReplayMemory
from trainer_node.memories.sum_tree import SumTree

_LEAST, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


class PrioritisedMemory(ReplayMemory):
    """Draws by priority. Rows of absent agents have none."""

    has_priorities = True

    def __init__(
        self, spaces: PolicySpaces, steps: int, slots: int, capacity: int, *, alpha: float, epsilon: float
    ) -> None:
        super().__init__(spaces, steps, slots, capacity)
        self._alpha, self._epsilon = alpha, epsilon
        self._tree = SumTree(self.ring.fragments * self.ring.rows_each)
        self._largest = 1.0

    def _added(self, place: int) -> None:
        self._tree.put_from(place * self.ring.rows_each, self.ring.held("mask", place) * self._powers(self._largest))

    def _powers(self, priorities: Array | float) -> Array:
        found: Array = np.clip(np.power(priorities, self._alpha), _LEAST, _MOST).astype(np.float32)
        return found

    def _draw(self, count: int, generator: np.random.Generator, beta: float) -> tuple[Array, Array]:
        self._refuse_if_empty()
        rows = self._tree.find((np.arange(count) + generator.random(count)) / count)
        powers = self._tree.numbers[rows]
        return rows, np.power(powers.min() / powers, beta).astype(np.float32)

    def update_priorities(self, rows: Array, td_errors: Array) -> None:
        """The priorities of these rows follow from their TD errors; a row that is there twice takes the last one.

        An error that is not finite (a network that diverges) counts as the largest one so far.
        """
        priorities = np.abs(td_errors.astype(np.float64)) + self._epsilon
        priorities[~np.isfinite(priorities)] = self._largest
        self._largest = max(self._largest, float(priorities.max(initial=0.0)))
        self._tree.put(rows, self._powers(priorities) * self.ring.column("mask", rows))

    def state(self) -> Columns:
        """With the priorities of what it holds, to the power of α."""
        held = min(self._ever_added, self.ring.fragments) * self.ring.rows_each
        return super().state() | {
            "powers": self._tree.numbers[:held].astype(np.float32),
            "largest": np.array(self._largest),
        }

    def load_state(self, arrays: Columns) -> None:
        super().load_state(arrays)
        self._largest = float(arrays["largest"])
        self._tree = SumTree(self.ring.fragments * self.ring.rows_each)
        if len(arrays["powers"]):
            self._tree.put_from(0, arrays["powers"])
