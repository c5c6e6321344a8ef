"""The figures of one update, under the field's names: `rollout/…`, `train/…`, `time/…`, `wait/…`, `policy/…`,
the environment's own metrics as `environment/…`, and estimates from recorded experience as `ope/…`."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from shared.config import Config
from shared.fragment import Fragment
from trainer_node.data_evaluation import DataEvaluation
from trainer_node.learner import Learner

_SMOOTHING = 0.9


class Figures:
    """Collects what a row of signals needs; only its clocks live longer than a row."""

    def __init__(self, config: Config) -> None:
        self._from_data = DataEvaluation(config)
        self.learning_seconds = 0.0
        self._last = time.monotonic()
        self._fps = 0.0

    def row(
        self,
        learner: Learner,
        fragments: list[Fragment],
        metrics: Mapping[str, float],
        version: int,
        waited: Mapping[str, float],
    ) -> dict[str, float]:
        """All figures after an update."""
        train = learner.counters.train
        now = time.monotonic()
        speed = sum(item.header.transitions for item in fragments) / max(now - self._last, 1e-9)
        self._fps = speed if not self._fps else _SMOOTHING * self._fps + (1 - _SMOOTHING) * speed
        self._last = now
        row: dict[str, float] = {
            "time/env_steps": train.env_steps,
            "time/episodes": train.episodes,
            "time/fps": self._fps,
            "train/updates": train.updates,
            "train/learn_seconds": self.learning_seconds,
            "policy/version": version,
            "policy/lag_mean": float(np.mean([version - 1 - item.header.version for item in fragments])),
            "policy/lag_max": float(max(version - 1 - item.header.version for item in fragments)),
            "rollout/acting_seconds": float(np.mean([item.header.acting_seconds for item in fragments])),
        }
        if learner.episodes:
            records = list(learner.episodes)
            row["rollout/ep_rew_mean"] = float(np.mean([record.episode_return for record in records]))
            row["rollout/ep_len_mean"] = float(np.mean([record.length for record in records]))
            successes = [record.success for record in records if record.success is not None]
            if successes:
                row["rollout/success_rate"] = float(np.mean(successes))
            for name in sorted({name for record in records for name in record.metrics}):
                values = [record.metrics[name] for record in records if name in record.metrics]
                row[f"environment/{name}"] = float(np.mean(values))
        row |= {f"wait/{name.replace(' ', '_')}_seconds": seconds for name, seconds in waited.items()}
        for policy in learner.policies.values():  # a dataset is that of one
            row |= self._from_data.figures(policy, train.updates)
        return row | dict(metrics)
