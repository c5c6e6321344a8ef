"""Pairs of observation and action: all that imitation looks at."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Pairs:
    """Observations and actions by column, flat: `[B, …]`."""

    observations: dict[str, Tensor]
    actions: dict[str, Tensor]

    def __len__(self) -> int:
        return len(next(iter(self.actions.values())))

    def take(self, rows: Tensor | slice) -> Pairs:
        """The minibatch of these rows."""
        return Pairs(
            {name: tensor[rows] for name, tensor in self.observations.items()},
            {name: tensor[rows] for name, tensor in self.actions.items()},
        )
