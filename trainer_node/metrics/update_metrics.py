"""The rows of training metrics: one for each `metrics.every`, and optionally one for each episode.

Nothing that is learned depends on them. Each mean has its spread next to it.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from stagecoach.shared.config.run_config import Config
from stagecoach.shared.datasets.read import read_dataset
from stagecoach.shared.experience.fragment import INFO, EpisodeRecord, Fragment
from stagecoach.shared.experience.spaces import Array, EnvironmentDescription
from stagecoach.shared.storage.metric_log import ENV_STEPS, VERSION
from stagecoach.trainer_node.learning.fold import all_metrics
from stagecoach.trainer_node.learning.learner import Learner
from stagecoach.trainer_node.learning.off_policy_evaluation import DataEvaluation

_SMOOTHING = 0.9
RETURN, LENGTH = "rollout/ep_rew", "rollout/ep_len"


class UpdateMetrics:
    """Collects the metrics of updates into rows; what it keeps between rows is not in a checkpoint."""

    def __init__(self, config: Config, learner: Learner, description: EnvironmentDescription) -> None:
        self._from_data = DataEvaluation(config, description, read_dataset)
        self._description = description
        self._every, self._index = config.metrics.every, config.metrics.every.index(learner.counters.train)
        self.learning_seconds = 0.0
        self._last = time.monotonic()
        self._fps = 0.0
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._counts: Counter[str] = Counter()
        self._lags: list[int] = []
        self._acting_lags: list[int] = []
        self._acting_seconds: list[float] = []
        self._env_steps = learner.counters.env_steps
        self._told: defaultdict[str, list[Array]] = defaultdict(list)

    def see(self, fragments: Sequence[Fragment]) -> None:
        """Numbers of each step's `info`, before a transform changes it."""
        for item in fragments:
            for policy_id, columns in item.columns.items():
                suffix = "" if len(item.columns) == 1 else f"/{policy_id}"
                told = {name.removeprefix(INFO): its for name, its in columns.items() if name.startswith(INFO)}
                for name, its in told.items():
                    self._told[f"rollout/info/{name}_mean" + suffix].append(its[columns["mask"] & ~np.isnan(its)])

    def take(self, fragments: Sequence[Fragment], metrics: Mapping[str, float], version: int) -> None:
        """Adds one update: the fragments, its metrics, and the version that it produced."""
        self._lags += [version - 1 - item.header.version for item in fragments]
        known = [item for item in fragments if item.pushed_at is not None]
        self._acting_lags += [max(0, (item.pushed_at or 0) - item.header.version) for item in known]
        self._acting_seconds += [item.header.acting_seconds for item in fragments]
        for name, value in metrics.items():
            self._sums[name] += value
            self._counts[name] += 1

    def due(self, learner: Learner) -> bool:
        """Returns whether `metrics.every` has passed; each update of warm-up counts as such."""
        index, before = self._every.index(learner.counters.train), self._index
        self._index = index
        return index > before or learner.counters.train.updates == 0

    def row(self, learner: Learner, version: int, waited: Mapping[str, float]) -> dict[str, float]:
        """The row of what was taken since the last one, which is forgotten even where this raises."""
        try:
            return self._row(learner, version, waited)
        finally:
            self._told.clear()
            self._lags, self._acting_lags, self._acting_seconds = [], [], []
            self._sums.clear()
            self._counts.clear()

    def _row(self, learner: Learner, version: int, waited: Mapping[str, float]) -> dict[str, float]:
        train, now = learner.counters.train, time.monotonic()
        before, self._env_steps = self._env_steps, learner.counters.env_steps
        speed = (self._env_steps - before) / max(now - self._last, 1e-9)
        self._fps = speed if not self._fps else _SMOOTHING * self._fps + (1 - _SMOOTHING) * speed
        self._last = now
        row: dict[str, float] = {
            ENV_STEPS: train.env_steps,
            "time/episodes": train.episodes,
            "time/gradient_steps": train.gradient_steps,
            "time/fps": self._fps,
            "train/updates": train.updates,
            "train/learn_seconds": self.learning_seconds,
            VERSION: version,
            "policy/lag_mean": float(np.mean(self._lags)),
            "policy/lag_max": float(max(self._lags)),
            "rollout/acting_seconds": float(np.mean(self._acting_seconds)),
        }
        if len(self._acting_lags) == len(self._lags):  # not of what is read from an archive
            row["policy/lag_acting_mean"] = float(np.mean(self._acting_lags))
            row["policy/lag_queue_mean"] = row["policy/lag_mean"] - row["policy/lag_acting_mean"]
        row |= of_episodes(learner.episodes)
        row |= of_policies(learner.episodes, learner.tallies, self._description)
        for policy_id, tally in learner.tallies.items():
            row |= {f"time/transitions/{policy_id}": tally.env_steps, f"time/episodes/{policy_id}": tally.episodes}
        for policy_id, shaped in learner.shaped.items():
            suffix = "" if len(learner.policies) == 1 else f"/{policy_id}"
            found = spread("rollout/ep_shaped_rew", list(shaped.returns))
            row |= {name + suffix: value for name, value in found.items()}
        row |= {f"wait/{name.replace(' ', '_')}_seconds": seconds for name, seconds in waited.items()}
        for policy_id, policy in learner.policies.items():
            suffix = "" if len(learner.policies) == 1 else f"/{policy_id}"
            found = self._from_data.figures(policy_id, policy, train.updates)
            row |= {name + suffix: value for name, value in found.items()}
        row |= {name: total / self._counts[name] for name, total in self._sums.items()}
        row |= {name: float(value) for name, value in all_metrics(learner.folds).items()}
        told = {name: np.concatenate(parts) for name, parts in self._told.items()}
        return row | {name: float(known.mean(dtype=np.float64)) for name, known in told.items() if known.size}


def of_episodes(records: Sequence[EpisodeRecord]) -> dict[str, float]:
    """Figures of the last training episodes: spread of returns and lengths, success, the environment's numbers."""
    row = spread(RETURN, [record.episode_return for record in records])
    row |= spread(LENGTH, [record.length for record in records])
    values: defaultdict[str, list[Any]] = defaultdict(list)
    for record in records:
        if record.success is not None:
            values["rollout/success_rate"].append(record.success)
        for agent, its in record.agent_returns.items():
            values[f"{RETURN}_mean/{agent}"].append(its)
        for name, its in record.metrics.items():
            values[f"environment/{name}"].append(its)
        for name, value in record.parameters.items():
            if not isinstance(value, str):
                values[f"parameter/{name}"].append(value)
    return row | {name: float(np.mean(values[name])) for name in sorted(values)}


def of_policies(
    records: Sequence[EpisodeRecord], policies: Collection[str], description: EnvironmentDescription
) -> dict[str, float]:
    """The mean return of each policy, the sum over its agents; in matches, over those that it played."""
    returns: dict[str, list[float]] = {policy_id: [] for policy_id in policies}
    for record in records:
        for player, its in record.returns_by_player(description).items():
            if player in returns:
                returns[player].append(its)
    return {f"{RETURN}_mean/{policy_id}": sum(its) / len(its) for policy_id, its in returns.items() if its}


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation, bounds, and the 10th and 90th percentile; nothing of no values."""
    if not values:
        return {}
    array = np.asarray(values, np.float64)
    low, high = np.percentile(array, (10, 90))
    return {
        f"{name}_mean": float(array.mean()), f"{name}_std": float(array.std()), f"{name}_min": float(array.min()),
        f"{name}_max": float(array.max()), f"{name}_p10": float(low), f"{name}_p90": float(high),
    }  # fmt: skip


LAG_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64)


def lag_buckets(lags: Mapping[int, int]) -> list[int]:
    """Returns the number of fragments with at most each of `LAG_BUCKETS` versions of lag, their total and sum."""
    counts = [sum(count for lag, count in lags.items() if lag <= bound) for bound in LAG_BUCKETS]
    return [*counts, sum(lags.values()), sum(lag * count for lag, count in lags.items())]


def episode_rows(fragments: Sequence[Fragment], env_steps: int, version: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Worker and metrics of each episode that ended in these fragments."""
    for item in fragments:
        for record in item.header.episodes:
            row = {ENV_STEPS: float(env_steps), VERSION: float(version)}
            row |= {"episode/return": record.episode_return, "episode/length": record.length}
            row |= {"episode/acted_by_version": item.header.version}
            row |= {} if record.success is None else {"episode/success": float(record.success)}
            row |= {f"parameter/{name}": float(its) for name, its in record.parameters.items() if type(its) is not str}
            row |= {f"episode/return/{agent}": value for agent, value in record.agent_returns.items()}
            yield item.header.worker_id, row | {f"environment/{name}": value for name, value in record.metrics.items()}
