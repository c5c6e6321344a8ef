"""Adam (Kingma and Ba 2015, algorithm 1), as PyTorch's functional form computes it.

`torch.optim.Adam` computes the same with the same bits, but making one imports PyTorch's compiler, which is a second of
each trainer's start, also after each crash.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor
from torch.optim.adam import adam

from shared.spaces import Array, Columns

_BETA1, _BETA2 = 0.9, 0.999
_SLOTS = ("step", "exp_avg", "exp_avg_sq")


class Adam:
    """The optimiser of one policy."""

    def __init__(self, parameters: Iterable[Tensor], epsilon: float) -> None:
        self._parameters = list(parameters)
        self._epsilon = epsilon
        self._slots: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        """Parameter's number → its steps (float32 scalar), and the running means of gradient and squared gradient."""

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Moves all parameters that have a gradient."""
        moved = [(number, item, item.grad) for number, item in enumerate(self._parameters) if item.grad is not None]
        for number, parameter, _ in moved:
            if number not in self._slots:
                fresh = torch.zeros_like(parameter), torch.zeros_like(parameter)
                self._slots[number] = (torch.tensor(0.0, dtype=torch.float32), *fresh)
        steps, means, squares = (list(slot) for slot in zip(*(self._slots[number] for number, _, _ in moved)))
        adam(
            [parameter for _, parameter, _ in moved], [gradient for _, _, gradient in moved], means, squares, [], steps,
            amsgrad=False, beta1=_BETA1, beta2=_BETA2, lr=learning_rate, weight_decay=0.0, eps=self._epsilon,
            maximize=False,
        )  # fmt: skip

    def state(self) -> Columns:
        """Named arrays: `<parameter's number>/step`, `…/exp_avg`, `…/exp_avg_sq`."""
        return {
            f"{number}/{name}": tensor.detach().cpu().numpy().copy()
            for number, slots in self._slots.items()
            for name, tensor in zip(_SLOTS, slots, strict=True)
        }

    def load_state(self, arrays: Mapping[str, Array]) -> None:
        """The inverse of `state`; raises `KeyError` or `IndexError` where it is another network's."""
        numbers = sorted({int(key.partition("/")[0]) for key in arrays})
        self._slots = {number: self._loaded(number, arrays) for number in numbers}

    def _loaded(self, number: int, arrays: Mapping[str, Array]) -> tuple[Tensor, Tensor, Tensor]:
        step, mean, square = (torch.from_numpy(np.array(arrays[f"{number}/{name}"])) for name in _SLOTS)
        device = self._parameters[number].device
        return step, mean.to(device), square.to(device)
