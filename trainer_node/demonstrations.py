"""The run's demonstrations: pairs of what was observed and what was done, read once and drawn from by algorithms.

They are no part of a checkpoint: the run's config has their SHA-256, and a generator says what is drawn of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch

from shared.dataset_config import DemonstrationsConfig
from shared.datasets.reading import read_dataset
from shared.spaces import Columns, EnvironmentDescription
from trainer_node.algorithms.pairs import Pairs


class Demonstrations:
    """What a run imitates. Nothing is read before it is asked for."""

    def __init__(
        self,
        config: DemonstrationsConfig,
        description: EnvironmentDescription,
        filtered: Callable[[Columns], Columns],
        fragment_steps: int,
    ) -> None:
        """`filtered` is what is done to the fragments of the run before they are learnt from: here as well."""
        self._config = config
        self._description = description
        self._filtered = filtered
        self._fragment_steps = fragment_steps

    @cached_property
    def columns(self) -> Columns:
        """`obs…` and `action…` of all steps, `[M, …]`.

        The first look reads them; raises `DatasetError`, or what the store of an archive raises.
        """
        recording = read_dataset(self._config, self._description)
        pieces = range(recording.pieces(self._fragment_steps))
        columns = self._filtered(recording.cut(pieces, self._fragment_steps)[0])
        spaces, mask = recording.spaces, columns["mask"]
        names = [*spaces.observation.column_names("obs"), *spaces.action.column_names("action")]
        return {name: columns[name][mask] for name in names}

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def draw(self, count: int, generator: torch.Generator, device: torch.device) -> Pairs:
        """So many of the steps, drawn with replacement by a generator on the CPU."""
        rows = torch.randint(len(self), (count,), generator=generator).numpy()
        drawn = {name: torch.from_numpy(np.ascontiguousarray(rows_of[rows])) for name, rows_of in self.columns.items()}
        return Pairs(
            {name: tensor.to(device) for name, tensor in drawn.items() if name.startswith("obs")},
            {name: tensor.to(device) for name, tensor in drawn.items() if name.startswith("action")},
        )
