"""Returns of the learned rewards, in addition to the environment's: for metrics alone.

They are not part of a checkpoint: a resumed run leaves out episodes that began before.
"""

from collections import deque

import numpy as np

from stagecoach.shared.experience.spaces import Array, Columns
from stagecoach.trainer_node.learning.building_blocks.reward_normalization import of_other_workers


class ShapedReturns:
    """Returns of one policy's last episodes; in turns, of episodes within one fragment alone."""

    def __init__(self, window: int, in_turns: bool = False) -> None:
        self.returns: deque[float] = deque(maxlen=window)
        self._in_turns = in_turns
        self._sums: dict[str, Array] = {}

    def take(self, source: str, first: bool, columns: Columns) -> None:
        """Adds a fragment's learned columns `[T, S]`; `first`: its episodes begin with it."""
        rewards = np.where(columns["mask"], columns["reward"], 0.0)
        over = columns["terminated"] | columns["truncated"]
        sums = self._sums.get(source)
        if sums is None or self._in_turns:
            self._sums = of_other_workers(self._sums, source)
            sums = self._sums[source] = np.full(rewards.shape[1], 0.0 if first else np.nan)
        begin = 0
        for step in np.flatnonzero(over.any(axis=1)):
            sums += rewards[begin : step + 1].sum(axis=0)
            ended = sums[over[step]]
            self.returns.extend(ended[~np.isnan(ended)].tolist())
            sums[over[step]] = 0.0
            begin = int(step) + 1
        sums += rewards[begin:].sum(axis=0)
