"""Reward normalisation: rewards divided by the running deviation of the discounted return (as VecNormalize does).

Learnt from the log in its order, so that it is the same on every replay; kept in the checkpoint.
"""

from __future__ import annotations

import numpy as np

from shared.spaces import Array, Columns

_EPSILON = 1e-8
_RUNNING = "running/"
_CLIP = 10.0


class RewardFilter:
    """Base of what changes rewards by what it has learnt of them: for one policy id, and kept in the checkpoint."""

    def scale(self, source: str, columns: Columns) -> Columns:
        """Takes the rewards in; the columns with changed ones (where nobody acted they stay)."""
        self.take_in(source, columns)
        return columns | {"reward": np.where(columns["mask"], self.scaled(columns["reward"]), columns["reward"])}

    def scaled(self, reward: Array) -> Array:
        """Rewards, each for itself, as they are to be learnt from now; float32."""
        raise NotImplementedError

    def take_in(self, source: str, columns: Columns) -> None:
        """Learns of a fragment's rewards; `source` (worker and life) tells what goes on with what."""
        raise NotImplementedError

    def state(self) -> Columns:
        """All that it has learnt, as named arrays."""
        raise NotImplementedError

    def load_state(self, arrays: Columns) -> None:
        """The inverse of `state`."""
        raise NotImplementedError

    def begin_with(self, arrays: Columns) -> None:
        """The statistics of another run, whose episodes are not ours; raises `KeyError` for those of another filter."""
        self.load_state({name: array for name, array in arrays.items() if not name.startswith(_RUNNING)})


class RewardScaling(RewardFilter):
    """Running statistics for one policy id."""

    def __init__(self, gamma: float) -> None:
        self._gamma = gamma
        self._moments = np.array([0.0, 0.0, 0.0])  # count, mean, sum of squared deviations
        self._running: dict[str, Array] = {}

    def scaled(self, reward: Array) -> Array:
        """Rewards divided by the deviation so far, float32."""
        count, _, squares = self._moments
        deviation = np.sqrt(squares / count + _EPSILON) if count else 1.0
        return np.clip(reward.astype(np.float64) / deviation, -_CLIP, _CLIP).astype(np.float32)

    def take_in(self, source: str, columns: Columns) -> None:
        """Moves the statistics; `source` (worker and life) tells whose returns go on."""
        reward, mask = columns["reward"].astype(np.float64), columns["mask"]
        over = columns["terminated"] | columns["truncated"]
        running = self._running.get(source, np.zeros(reward.shape[1]))
        discounted = np.empty_like(reward)
        for step in range(len(reward)):
            running = running * self._gamma + reward[step]
            discounted[step] = running
            running = np.where(over[step], 0.0, running)
        worker = source.partition(":")[0]
        self._running = {key: value for key, value in self._running.items() if key.partition(":")[0] != worker}
        self._running[source] = running
        self._merge(discounted[mask])

    def _merge(self, values: Array) -> None:
        if not values.size:
            return
        count, mean, squares = self._moments
        delta = values.mean() - mean
        total = count + values.size
        self._moments = np.array(
            [
                total,
                mean + delta * values.size / total,
                squares + ((values - values.mean()) ** 2).sum() + delta**2 * count * values.size / total,
            ]
        )

    def state(self) -> Columns:
        """Named arrays."""
        return {"moments": self._moments.copy()} | {_RUNNING + key: value for key, value in self._running.items()}

    def load_state(self, arrays: Columns) -> None:
        """The inverse of `state`."""
        self._moments = np.array(arrays["moments"])
        self._running = {k.removeprefix(_RUNNING): np.array(v) for k, v in arrays.items() if k.startswith(_RUNNING)}
