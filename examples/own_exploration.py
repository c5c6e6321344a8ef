"""A way to explore and a replay buffer of one's own; examples/own_exploration.yaml names both."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stagecoach import Exploration, Policy, ReplayBuffer


class Persistent(Exploration):
    """ε-greedy that repeats each random action for some steps (Dabney et al. 2021), so that it gets further."""

    by_slot = True  # it remembers something of each slot, and so sees all of them in each step

    def __init__(self, repeats: int, epsilon: float) -> None:
        """Created for each fragment; `epsilon` is the schedule's value."""
        self._repeats, self._epsilon = repeats, epsilon
        self._left, self._held = torch.zeros(()), torch.zeros((), dtype=torch.int64)

    def act(
        self, policy: Policy, observations: Mapping[str, Tensor], generator: torch.Generator
    ) -> tuple[dict[str, Tensor], Tensor]:
        """All that is random comes from `generator`: a worker that takes over acts the same."""
        values = policy.exploring_parameters(observations, generator)
        best = policy.distribution.mode(values)["action"]
        others = torch.randint(values.shape[1], best.shape, generator=generator)
        begins = (torch.rand(best.shape, generator=generator) < self._epsilon) & (self._left <= 0)
        self._left = torch.where(begins, float(self._repeats), self._left - 1)
        self._held = torch.where(begins, others, self._held)
        return {"action": torch.where(self._left > 0, self._held, best)}, values


class Recent(ReplayBuffer):
    """Draws `of` transitions uniformly and learns from the newest of them."""

    def __init__(self, *sizes: Any, of: int = 2) -> None:
        super().__init__(*sizes)
        self._of = of

    def draw(self, count: int, generator: np.random.Generator, beta: float) -> tuple[Any, Any]:
        """Rows and their weights; all that is random comes from `generator`."""
        rows, weights = super().draw(count * self._of, generator, beta)
        newest = self.ring.numbers(rows).reshape(count, self._of).argmax(axis=1)
        return rows.reshape(count, self._of)[np.arange(count), newest], weights[:count]
