"""What every reward signal is: a module that says what transitions are worth, and learns to say it better.

A signal stays with the trainer. All that it has learnt is in its parameters and buffers, which are its state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Rows:
    """Transitions, a row each; every dict is columns `[B, …]` (shared/fragment.py)."""

    observations: dict[str, Tensor]
    """`obs…`."""
    actions: dict[str, Tensor]
    """`action…`."""
    next_observations: dict[str, Tensor]
    """`obs…` after the step; where it terminated and that is not known, what stands there means nothing."""

    def __len__(self) -> int:
        return len(next(iter(self.observations.values())))

    def take(self, rows: Tensor | slice) -> Rows:
        """Those."""
        return Rows(*({name: tensor[rows] for name, tensor in columns.items()} for columns in vars(self).values()))


class Signal(nn.Module):
    """Base of all signals. A subclass computes `reward` and `loss`; parameters that want gradients are learnt."""

    needs_next: ClassVar[bool] = True
    """Whether it asks for next observations; then steps whose next one is not known are neither rewarded nor learnt."""
    scaled: ClassVar[bool] = True
    """Whether its rewards are divided by the running deviation of their discounted returns."""

    def observe(self, observations: Mapping[str, Tensor]) -> None:
        """Takes each update's observations `[B, …]` into statistics, before anything else, also in heat-up."""

    def reward(self, rows: Rows) -> Tensor:
        """`[B]`; no gradients are recorded."""
        raise NotImplementedError

    def loss(self, rows: Rows, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """The scalar loss of a minibatch, and metrics; `generator` (CPU) gives all its random numbers."""
        raise NotImplementedError
