"""The rows of training metrics: one for each `metrics.every`, and optionally one for each episode.

Nothing that is learned depends on them. Each mean has its spread next to it.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from stagecoach.shared.base import world
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


@dataclass
class _Measured:
    """Values of the updates since the last row."""

    lags: list[int] = field(default_factory=list)
    acting_lags: list[int] = field(default_factory=list)
    acting_seconds: list[float] = field(default_factory=list)
    metrics: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    info: defaultdict[str, list[Array]] = field(default_factory=lambda: defaultdict(list))


class UpdateMetrics:
    """Collects the metrics of updates into rows; what it keeps between rows is not in a checkpoint."""

    def __init__(self, config: Config, learner: Learner, description: EnvironmentDescription) -> None:
        self._from_data = DataEvaluation(config, description, read_dataset)
        self._description = description
        self._every, self._index = config.metrics.every, config.metrics.every.index(learner.counters.train)
        self.learning_seconds = 0.0
        self._last = world.monotonic()
        self._fps = 0.0
        self._env_steps = learner.counters.env_steps
        self._measured = _Measured()

    def see(self, fragments: Sequence[Fragment]) -> None:
        """Adds the numbers of each step's `info`, before a transform changes them."""
        for item in fragments:
            for policy_id, columns in item.columns.items():
                for name in [name for name in columns if name.startswith(INFO)]:
                    metric = f"rollout/info/{name.removeprefix(INFO)}_mean" + _suffix(policy_id, item.columns)
                    known = columns["mask"] & ~np.isnan(columns[name])
                    self._measured.info[metric].append(columns[name][known])

    def take(self, fragments: Sequence[Fragment], metrics: Mapping[str, float], version: int) -> None:
        measured = self._measured
        measured.lags += [version - 1 - item.header.version for item in fragments]
        known = [item for item in fragments if item.pushed_at is not None]
        measured.acting_lags += [max(0, (item.pushed_at or 0) - item.header.version) for item in known]
        measured.acting_seconds += [item.header.acting_seconds for item in fragments]
        for name, value in metrics.items():
            measured.metrics[name].append(value)

    def due(self, learner: Learner) -> bool:
        """Returns whether `metrics.every` has passed; each update of warm-up counts as such."""
        index, before = self._every.index(learner.counters.train), self._index
        self._index = index
        return index > before or learner.counters.train.updates == 0

    def row(self, learner: Learner, version: int, waited: Mapping[str, float]) -> dict[str, float]:
        measured, self._measured = self._measured, _Measured()
        train, now = learner.counters.train, world.monotonic()
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
            "policy/lag_mean": fmean(measured.lags),
            "policy/lag_max": float(max(measured.lags)),
            "rollout/acting_seconds": fmean(measured.acting_seconds),
        }
        if len(measured.acting_lags) == len(measured.lags):  # an archive does not have them
            row["policy/lag_acting_mean"] = fmean(measured.acting_lags)
            row["policy/lag_queue_mean"] = row["policy/lag_mean"] - row["policy/lag_acting_mean"]
        row |= of_episodes(learner.episodes)
        row |= of_policies(learner.episodes, learner.tallies, self._description)
        for policy_id, tally in learner.tallies.items():
            row |= {f"time/transitions/{policy_id}": tally.env_steps, f"time/episodes/{policy_id}": tally.episodes}
        for policy_id, policy in learner.policies.items():
            found = self._from_data.figures(policy_id, policy, train.updates)
            if policy_id in learner.shaped:
                found = {**found, **spread("rollout/ep_shaped_rew", list(learner.shaped[policy_id].returns))}
            row |= {name + _suffix(policy_id, learner.policies): value for name, value in found.items()}
        row |= {f"wait/{name.replace(' ', '_')}_seconds": seconds for name, seconds in waited.items()}
        row |= {name: sum(values) / len(values) for name, values in measured.metrics.items()}
        row |= {name: float(value) for name, value in all_metrics(learner.folds).items()}
        info = {name: np.concatenate(parts) for name, parts in measured.info.items()}
        return row | {name: float(known.mean(dtype=np.float64)) for name, known in info.items() if known.size}


def _suffix(policy_id: str, policies: Collection[str]) -> str:
    return "" if len(policies) == 1 else f"/{policy_id}"


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
