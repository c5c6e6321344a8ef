"""A rate limit: how often something may happen within a window of time."""

from __future__ import annotations

import time
from collections import deque


class Rate:
    """Counts what happens; says when that is too often."""

    def __init__(self, allowed: int, window_seconds: float) -> None:
        self._allowed = allowed
        self._window = window_seconds
        self._times: deque[float] = deque()

    @property
    def count(self) -> int:
        """How often it has happened within the window."""
        return len(self._within())

    def exceeded(self) -> bool:
        """Counts once more; whether that is more than allowed within the window."""
        self._times.append(time.monotonic())
        return self.count > self._allowed

    def pause_seconds(self) -> float:
        """How long to wait until one more is within the limit; 0 where it is now."""
        times = self._within()
        if len(times) < max(1, self._allowed):
            return 0.0
        return times[-max(1, self._allowed)] + self._window - time.monotonic()

    def _within(self) -> deque[float]:
        while self._times and time.monotonic() - self._times[0] > self._window:
            self._times.popleft()
        return self._times
