"""The schedule: which phase the run is in, when a checkpoint is due, and when the run ends.

All from the trainer's counters, except two things that change nothing that is learnt: checkpoints by the clock and
the bound on hours.
"""

from __future__ import annotations

import time

from shared.config import Config
from shared.steps import Phase, PhaseCounters


class RunSchedule:
    """Heat-up, then training until one of `stop_at` is reached."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._started = time.monotonic()
        self._checkpointed_at = time.monotonic()
        self._checkpoint_index = 0

    def phase(self, counters: PhaseCounters) -> Phase:
        """HEATUP until its duration has passed, then TRAIN."""
        heatup = self._config.heatup
        return Phase.TRAIN if heatup.amount == 0 or heatup.reached(counters.heatup) else Phase.HEATUP

    def checkpoint_due(self, counters: PhaseCounters, log_bytes: int) -> bool:
        """By the counters, by the clock, or because the log is half full (a durable checkpoint frees it)."""
        checkpoint = self._config.checkpoint
        return (
            checkpoint.every.index(counters.train) > self._checkpoint_index
            or (
                checkpoint.every_seconds is not None
                and time.monotonic() - self._checkpointed_at >= checkpoint.every_seconds
            )
            or self.log_half_full(log_bytes)
        )

    def log_half_full(self, log_bytes: int) -> bool:
        """Whether the log needs room; a durable checkpoint frees what it covers."""
        return log_bytes >= self._config.rollout.max_log_bytes // 2

    def checkpointed(self, counters: PhaseCounters) -> None:
        """A checkpoint was taken at these counters (or loaded)."""
        self._checkpoint_index = self._config.checkpoint.every.index(counters.train)
        self._checkpointed_at = time.monotonic()

    def exhausted(self, counters: PhaseCounters) -> bool:
        """Whether a bound on steps, updates, episodes or hours is reached."""
        stop, train = self._config.stop_at, counters.train
        return any(
            bound is not None and value >= bound
            for bound, value in (
                (stop.env_steps, train.env_steps),
                (stop.updates, train.updates),
                (stop.episodes, train.episodes),
                (stop.hours, (time.monotonic() - self._started) / 3600),
            )
        )
