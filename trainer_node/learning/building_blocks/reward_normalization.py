"""Reward normalization, learned in log order, so that every replay is the same; kept in checkpoints.

`ShapedReturns` counts what was learned from, for metrics alone; a resumed run leaves out episodes that began before.
"""

from collections import deque
from collections.abc import Mapping

import numpy as np

from stagecoach.shared.experience.spaces import Array, Columns

_EPSILON = 1e-8
_RUNNING = "running/"
_CLIP = 10.0


def of_other_workers(kept: Mapping[str, Array], source: str) -> dict[str, Array]:
    """Drops the worker's other sources: a worker continues one line of episodes."""
    worker = source.partition(":")[0]
    return {key: its for key, its in kept.items() if key.partition(":")[0] != worker}


class RewardFilter:
    """Base of filters that rescale one policy's rewards by running statistics."""

    def scale(self, source: str, columns: Columns) -> Columns:
        """Updates the statistics and returns the columns with rescaled rewards; steps without an action keep theirs."""
        self.take_in(source, columns)
        return columns | {"reward": np.where(columns["mask"], self.scaled(columns["reward"]), columns["reward"])}

    def scaled(self, reward: Array) -> Array:
        """Returns rescaled rewards, elementwise, float32."""
        raise NotImplementedError

    def take_in(self, source: str, columns: Columns) -> None:
        """Updates the statistics by a fragment; episodes continue within a `source` (worker and seed lineage)."""
        raise NotImplementedError

    def state(self) -> Columns:
        raise NotImplementedError

    def load_state(self, arrays: Columns) -> None:
        raise NotImplementedError

    def begin_with(self, arrays: Columns) -> None:
        """Takes another run's statistics without its episodes; raises `KeyError` for another filter's."""
        self.load_state({name: array for name, array in arrays.items() if not name.startswith(_RUNNING)})


class RewardScaling(RewardFilter):
    """Divides rewards by the running deviation of the discounted return, as VecNormalize does."""

    def __init__(self, gamma: float, in_turns: bool = False) -> None:
        """`in_turns`: returns restart with each fragment, which lacks turns whose outcome is still open at its end."""
        self._gamma, self._in_turns = gamma, in_turns
        self._moments = np.array([0.0, 0.0, 0.0])  # count, mean, sum of squared deviations
        self._running: dict[str, Array] = {}

    def scaled(self, reward: Array) -> Array:
        count, _, squares = self._moments
        deviation = np.sqrt(squares / count + _EPSILON) if count else 1.0
        return np.clip(reward.astype(np.float64) / deviation, -_CLIP, _CLIP).astype(np.float32)

    def take_in(self, source: str, columns: Columns) -> None:
        reward, mask = columns["reward"].astype(np.float64), columns["mask"]
        over = columns["terminated"] | columns["truncated"]
        none = np.zeros(reward.shape[1])
        running = none if self._in_turns else self._running.get(source, none)
        discounted = np.empty_like(reward)
        for step in range(len(reward)):
            running = np.where(mask[step], running * self._gamma + reward[step], running)
            discounted[step] = running
            running = np.where(over[step], 0.0, running)
        self._running = of_other_workers(self._running, source)
        self._running[source] = running
        values = discounted[mask]
        if not values.size:
            return
        count, mean, squares = self._moments
        delta, total = values.mean() - mean, count + values.size
        squares = squares + ((values - values.mean()) ** 2).sum() + delta**2 * count * values.size / total
        self._moments = np.array([total, mean + delta * values.size / total, squares])

    def state(self) -> Columns:
        return {"moments": self._moments.copy()} | {_RUNNING + key: value for key, value in self._running.items()}

    def load_state(self, arrays: Columns) -> None:
        self._moments = np.array(arrays["moments"])
        self._running = {k.removeprefix(_RUNNING): np.array(v) for k, v in arrays.items() if k.startswith(_RUNNING)}


class RewardAverage(RewardFilter):
    """Subtracts the rewards' exponential moving average, as Coach's RewardEwmaNormalizationFilter does."""

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha
        self._average: float | None = None

    def scaled(self, reward: Array) -> Array:
        return (reward.astype(np.float64) - (self._average or 0.0)).astype(np.float32)

    def take_in(self, source: str, columns: Columns) -> None:
        counted = columns["reward"][columns["mask"]].astype(np.float64)
        if not counted.size:
            return
        mean = float(counted.mean())
        self._average = mean if self._average is None else self._average + self._alpha * (mean - self._average)

    def state(self) -> Columns:
        return {"average": np.array([] if self._average is None else [self._average])}

    def load_state(self, arrays: Columns) -> None:
        (average,) = arrays["average"].tolist() or [None]
        self._average = average


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
