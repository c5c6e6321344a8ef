"""Adam (Kingma and Ba 2015, algorithm 1) by PyTorch's fused kernel, over all parameters of a network as one tensor.

The kernel is called as it is: making a `torch.optim.Adam` imports PyTorch's compiler, which is a second of each
trainer's start, also after each crash; and PyTorch's own wrapping of it takes longer than a small network's step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from shared.spaces import Array, Columns
from trainer_node.algorithms.flat import Flat

_BETA1, _BETA2 = 0.9, 0.999


class Adam:
    """The optimiser of one policy, which then has its parameters lie where this one puts them (flat.py)."""

    def __init__(self, parameters: Iterable[Tensor], epsilon: float) -> None:
        self._parameters = list(parameters)
        self._epsilon = epsilon
        self._numbers = [number for number, item in enumerate(self._parameters) if item.numel()]
        self._flat = Flat(self._parameters[number] for number in self._numbers)
        self._gradient, self._mean, self._square = (torch.zeros_like(self._flat.values) for _ in range(3))
        self._gradients = self._flat.views(self._gradient)
        self._steps = torch.zeros((), device=self._flat.values.device)
        self._had: set[int] = set()
        """The places in `_numbers` of parameters that have had a gradient."""

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self, learning_rate: float, max_norm: float | None = None) -> Tensor:
        """Moves all parameters by their gradients; where one has none, that counts as zero.

        Gradients whose norm is above `max_norm` are scaled down to it. Answers the norm as it was.
        """
        self._flat.check()
        self._gather()
        norm: Tensor = torch.linalg.vector_norm(self._gradient)
        if max_norm is not None:
            self._gradient.mul_((norm + 1e-6).reciprocal_().mul_(max_norm).clamp_(max=1.0))
        self._steps.add_(1)
        torch._fused_adam_(
            [self._flat.values], [self._gradient], [self._mean], [self._square], [], [self._steps],
            lr=learning_rate, beta1=_BETA1, beta2=_BETA2, weight_decay=0.0, eps=self._epsilon, amsgrad=False,
            maximize=False,
        )  # fmt: skip
        return norm

    def _gather(self) -> None:
        found = enumerate(self._parameters[number].grad for number in self._numbers)
        there = {place: gradient for place, gradient in found if gradient is not None}
        if len(there) < len(self._numbers):
            self._gradient.zero_()
        if there:
            torch._foreach_copy_([self._gradients[place] for place in there], list(there.values()))
        self._had.update(there)

    def state(self) -> Columns:
        """Named arrays: `<parameter's number>/step`, `…/exp_avg`, `…/exp_avg_sq`; of those that had a gradient."""
        steps = self._steps.cpu().numpy()
        means, squares = self._flat.views(self._mean), self._flat.views(self._square)
        arrays: Columns = {}
        for place in sorted(self._had):
            number = self._numbers[place]
            arrays[f"{number}/step"] = steps.copy()
            arrays[f"{number}/exp_avg"] = means[place].cpu().numpy().copy()
            arrays[f"{number}/exp_avg_sq"] = squares[place].cpu().numpy().copy()
        return arrays

    def load_state(self, arrays: Mapping[str, Array]) -> None:
        """The inverse of `state`; raises `KeyError`, `IndexError` or `ValueError` where it is another network's."""
        numbers = {int(key.partition("/")[0]) for key in arrays}
        if strange := numbers - set(self._numbers):
            if all(number < len(self._parameters) for number in strange):  # without elements: nothing to know
                numbers -= strange
            else:
                raise IndexError(f"a state of parameter {max(strange)}, of {len(self._parameters)}")
        self._had = {self._numbers.index(number) for number in numbers}
        for flat, name in ((self._mean, "exp_avg"), (self._square, "exp_avg_sq")):
            flat.zero_()
            views = self._flat.views(flat)
            for place in self._had:
                _put(views[place], f"{self._numbers[place]}/{name}", arrays)
        self._steps.fill_(max((float(arrays[f"{number}/step"]) for number in numbers), default=0.0))


def _put(view: Tensor, name: str, arrays: Mapping[str, Array]) -> None:
    array = arrays[name]
    if array.shape != tuple(view.shape):
        raise ValueError(f"{name} has the shape {array.shape}, expected {tuple(view.shape)}")
    view.copy_(torch.from_numpy(np.array(array)))
