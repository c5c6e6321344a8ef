"""A replay buffer of your own, with priorities: `stagecoach train examples/own_replay_buffer.yaml`."""

from typing import Any

import numpy as np

import stagecoach as sc


class RankBased(sc.ReplayBuffer):
    """Draws the transition with the i-th largest TD error in proportion to i^-α (Schaul et al. 2016, section 3.3)."""

    def __init__(self, *sizes: Any, alpha: float = 0.7, beta: float = 0.5) -> None:
        super().__init__(*sizes)
        self.alpha, self.beta = alpha, beta
        self.errors = np.zeros(self.rows, np.float32)  # 0 where nothing may be drawn

    def added(self, rows: slice, drawable: np.ndarray) -> None:
        """A new fragment has the largest error so far, so that it is soon drawn."""
        self.errors[rows] = drawable * self.errors.max(initial=1.0)

    def draw(self, count: int, generator: np.random.Generator, beta: float) -> tuple[np.ndarray, np.ndarray]:
        """Rows and their weights in the loss; all that is random comes from `generator`."""
        order = np.argsort(-self.errors, kind="stable")[: len(self)]
        chances = np.arange(1, len(order) + 1) ** -self.alpha
        chances /= chances.sum()
        ranks = generator.choice(len(order), size=count, p=chances)
        weights = chances[ranks] ** -self.beta
        return order[ranks], (weights / weights.max()).astype(np.float32)

    def update_priorities(self, rows: np.ndarray, td_errors: np.ndarray) -> None:
        """Called after each gradient step, with the TD error of each drawn row."""
        self.errors[rows] = np.nan_to_num(np.abs(td_errors)) + 1e-6

    def state(self) -> dict[str, np.ndarray]:
        return super().state() | {"errors": self.errors}

    def load_state(self, arrays: dict[str, np.ndarray]) -> None:
        super().load_state(arrays)
        self.errors[:] = arrays["errors"]
