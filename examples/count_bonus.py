"""DQN with hooks of one's own, given to Stagecoach as `algorithm: count_bonus:CountBonus`.

An observation that has seldom been seen is worth a bonus, β / √n of its cell (Strehl and Littman 2008). The counts are
an extra in each checkpoint, so that a resume continues with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from pydantic import Field

from stagecoach import DQN, Columns, Counters, DQNConfig, Experience, Lesson, Minibatch, QNetwork, Setting


class CountBonusConfig(DQNConfig):
    """DQN's fields, and those of the bonus."""

    bonus: float = Field(1.0, ge=0)
    """β."""
    low: tuple[float, ...]
    """Lowest value of each element of the observation; lower values share its cell."""
    high: tuple[float, ...]
    """Highest value; higher values share its cell."""
    cells: int = Field(20, ge=2)
    """Along each element."""


class CountBonus(DQN):
    """Learns one policy."""

    Config = CountBonusConfig

    def __init__(self, policy: QNetwork, config: CountBonusConfig, setting: Setting) -> None:
        super().__init__(policy, config, setting)
        self._bonus, self._cells = config.bonus, config.cells
        self._low, self._high = np.array(config.low, np.float32), np.array(config.high, np.float32)
        self._counts = np.zeros(config.cells ** len(config.low), np.int64)

    def observe(self, experience: Sequence[Experience]) -> None:
        """Called once with each fragment, in the order of the log: before it is learned from, and in warm-up."""
        for item in experience:
            np.add.at(self._counts, self._cell(item.columns["obs"][item.columns["mask"]]), 1)
        super().observe(experience)

    def learn(self, batch: Minibatch, counters: Counters, generator: torch.Generator) -> Lesson:
        """A gradient step. The memory keeps rewards as they were, so a bonus is what it is worth by now."""
        seen = self._counts[self._cell(batch.next_observations["obs"].cpu().numpy())]
        bonus = torch.from_numpy((self._bonus / np.sqrt(np.maximum(seen, 1))).astype(np.float32))
        lesson = super().learn(replace(batch, reward=batch.reward + bonus.to(batch.reward.device)), counters, generator)
        return replace(lesson, metrics=lesson.metrics | {"train/bonus": bonus.mean()})

    def state(self) -> Columns:
        """Returns the counts in addition to the state of DQN."""
        return super().state() | {"counts": self._counts.copy()}

    def load_state(self, arrays: Columns) -> None:
        """The inverse of `state`."""
        self._counts[:] = arrays["counts"]
        super().load_state({name: array for name, array in arrays.items() if name != "counts"})

    def _cell(self, observations: np.ndarray) -> np.ndarray:
        """Returns the cell number of each observation: `[B, D]` → `[B]`."""
        along = (observations - self._low) / (self._high - self._low) * self._cells
        places = np.clip(along.astype(np.int64), 0, self._cells - 1)
        return np.asarray(np.ravel_multi_index(tuple(places.T), (self._cells,) * len(self._low)))
