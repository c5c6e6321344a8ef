"""A reward signal of your own, a bonus for what is new: `stagecoach train examples/own_reward_signal.yaml`."""

from collections.abc import Mapping

import torch
from torch import Tensor

import stagecoach as sc


class CountNovelty(sc.RewardSignal):
    """Pays 1 / √n for an observation whose cell has been seen n times (Strehl and Littman 2008)."""

    counts: Tensor

    def __init__(self, policy: sc.Policy, low: list[float], high: list[float], cells: int = 20) -> None:
        super().__init__(policy)
        self.low, self.high, self.cells = torch.tensor(low), torch.tensor(high), cells
        self.register_buffer("counts", torch.zeros(cells ** len(low)))  # buffers are in each checkpoint

    def cell(self, columns: Mapping[str, Tensor]) -> Tensor:
        seen = (columns["obs"].cpu() - self.low) / (self.high - self.low) * self.cells
        places = seen.to(torch.int64).clamp(0, self.cells - 1)
        return (places * self.cells ** torch.arange(places.shape[1])).sum(dim=1).to(self.counts.device)

    def observe(self, observations: Mapping[str, Tensor]) -> None:
        """Called once with the observations of each update, in log order, and in warm-up."""
        self.counts += torch.bincount(self.cell(observations), minlength=len(self.counts))

    def reward(self, rows: sc.Rows) -> Tensor:
        """The rewards of `rows`, as they are by now: `[B]`."""
        return self.counts[self.cell(rows.next_observations)].clamp_min(1).rsqrt()

    def loss(self, rows: sc.Rows, generator: torch.Generator) -> tuple[Tensor | None, dict[str, Tensor]]:
        """A signal that learns returns the loss of its parameters here; this one has metrics alone."""
        return None, {"train/novelty_cells": (self.counts > 0).sum()}
