"""Parameters beside each other in one tensor, of which each is a view: what is done to all of them is one operation.

Networks here are small, and an operation costs more than its arithmetic: Adam's step is one pass instead of one for
each parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

_BYTES = 64
"""Each begins at a multiple of this, as a tensor of its own would: what products round to may depend on it."""


class Flat:
    """Parameters of one dtype and device. From now on they lie in `values`; between them are zeros."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        kinds = {(parameter.dtype, parameter.device) for parameter in self._parameters}
        if len(kinds) != 1:
            raise ValueError(f"parameters of one dtype on one device can lie in one tensor, found {kinds or 'none'}")
        self._starts, size = [], 0
        unit = _BYTES // self._parameters[0].element_size()
        for parameter in self._parameters:
            self._starts.append(size)
            size += math.ceil(parameter.numel() / unit) * unit
        self.values = torch.zeros(size, dtype=self._parameters[0].dtype, device=self._parameters[0].device)
        for parameter, view in zip(self._parameters, self.views(self.values)):
            view.copy_(parameter.detach())
            parameter.data = view
        self._places = [(parameter, parameter.data_ptr()) for parameter in self._parameters]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Of a tensor like `values`, the part of each parameter, in its shape and memory order."""
        return [
            flat.as_strided(parameter.shape, parameter.stride(), start)
            for parameter, start in zip(self._parameters, self._starts)
        ]

    def check(self) -> None:
        """Raises `RuntimeError` where a parameter has been moved elsewhere since: it would not be learnt any more."""
        if any(parameter.data_ptr() != place for parameter, place in self._places):
            raise RuntimeError(
                "a parameter lies elsewhere than its optimiser put it; move a network to its device, or copy it, "
                "before its optimiser is made"
            )
