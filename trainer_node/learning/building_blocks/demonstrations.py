"""A policy's demonstrations: pairs of what was observed and what was done, read once and drawn from by algorithms."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from stagecoach.shared.datasets.recording import Recordings
from stagecoach.shared.experience.spaces import Columns


@dataclass(frozen=True)
class Pairs:
    """Observations and actions by column, flat, `[B, …]`: all that imitation reads."""

    observations: dict[str, Tensor]
    actions: dict[str, Tensor]

    def __len__(self) -> int:
        return len(next(iter(self.actions.values())))

    def take(self, rows: Tensor | slice) -> Self:
        parts = ({name: tensor[rows] for name, tensor in columns.items()} for columns in vars(self).values())
        return type(self)(*parts)


class Demonstrations:
    """A policy's demonstrations, read on first use."""

    def __init__(
        self, read: Callable[[], Recordings], policy_id: str, filtered: Callable[[Columns], Columns], steps: int
    ) -> None:
        """`filtered` is what is done to the run's fragments, of so many `steps`, before they are learned from."""
        self._read, self._policy_id, self._filtered, self._fragment_steps = read, policy_id, filtered, steps

    @cached_property
    def columns(self) -> Columns:
        """`obs…` and `action…` of all steps, `[M, …]`, read once; raises what `read` raises."""
        recording = self._read()[self._policy_id]
        pieces = range(recording.pieces(self._fragment_steps))
        columns = self._filtered(recording.cut(pieces, self._fragment_steps)[0])
        spaces, mask = recording.spaces, columns["mask"]
        names = [*spaces.observation.column_names("obs"), *spaces.action.column_names("action")]
        return {name: columns[name][mask] for name in names}

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def draw(self, count: int, generator: torch.Generator, device: torch.device) -> Pairs:
        """`count` of the steps, drawn with replacement by a generator on the CPU."""
        rows = torch.randint(len(self), (count,), generator=generator).numpy()
        drawn = {name: torch.from_numpy(array[rows]).to(device) for name, array in self.columns.items()}
        parts = ({name: drawn[name] for name in drawn if name.startswith(prefix)} for prefix in ("obs", "action"))
        return Pairs(*parts)
