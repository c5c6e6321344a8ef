"""A fold of your own, adaptive difficulty: `stagecoach train examples/own_fold.yaml`."""

from collections.abc import Mapping
from typing import Any

import stagecoach


class AdaptiveDifficulty(stagecoach.Fold):
    """Raises a parameter of the environment when recent episodes succeed often, and lowers it when they fail often."""

    def __init__(self, parameter: str, low: int, high: int, aim: float = 0.7, window: int = 50) -> None:
        self.parameter, self.low, self.high, self.aim, self.window = parameter, low, high, aim, window
        self.level, self.successes = low, list[bool]()
        self.changes: list[str] = []

    def observe_episode(self, record: Any, counters: Any) -> None:
        if record.parameters[self.parameter] != self.level:
            return  # it began before the last change
        self.successes.append(bool(record.success))
        if len(self.successes) < self.window:
            return
        share, before = sum(self.successes) / self.window, self.level
        step = 1 if share >= self.aim else -1 if share < self.aim / 2 else 0
        self.level = min(self.high, max(self.low, self.level + step))
        self.successes = []
        if self.level != before:
            self.changes.append(f"{self.parameter} is {self.level} from {counters.env_steps:,} env steps on")

    def parameters(self) -> dict[str, Any]:
        return {self.parameter: self.level}

    def state(self) -> dict[str, Any]:
        return {"level": self.level, "successes": self.successes}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.level, self.successes = state["level"], state["successes"]

    def metrics(self) -> dict[str, float]:
        return {self.parameter: self.level}

    def drain_events(self) -> list[str]:
        found, self.changes = self.changes, []
        return found
