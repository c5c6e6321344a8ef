"""Gradient steps by Adam, transfer to the device, precision, and state as named arrays.

Adam (Kingma and Ba 2015, algorithm 1) is PyTorch's fused kernel over all parameters of a network as one tensor, called
directly: `torch.optim.Adam` imports PyTorch's compiler, a second of each trainer's start, and its wrapping takes longer
than a small network's step.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from stagecoach.shared.experience.spaces import Array, Columns

_BETA1, _BETA2 = 0.9, 0.999
_ALIGNMENT_BYTES = 64
"""Alignment of each parameter, as in a separate tensor: rounding of products may depend on it."""


class Adam:
    """Adam for parameters of one dtype on one device, which it moves into one tensor.

    With a weight decay it is AdamW (Loshchilov and Hutter 2019).
    """

    def __init__(self, parameters: Iterable[Tensor], epsilon: float, weight_decay: float = 0.0) -> None:
        self.parameters = list(parameters)
        self._epsilon, self._decay = epsilon, weight_decay
        self._numbers = [number for number, item in enumerate(self.parameters) if item.numel()]
        self.moved = [self.parameters[number] for number in self._numbers]
        """Parameters with elements."""
        kinds = {(parameter.dtype, parameter.device) for parameter in self.moved}
        if len(kinds) != 1:
            raise ValueError(f"parameters of one dtype on one device can lie in one tensor, found {kinds or 'none'}")
        unit = _ALIGNMENT_BYTES // self.moved[0].element_size()
        sizes = (math.ceil(parameter.numel() / unit) * unit for parameter in self.moved)
        self._ends = list(itertools.accumulate(sizes))
        *self._starts, size = [0, *self._ends]
        self._values = torch.zeros(size, dtype=self.moved[0].dtype, device=self.moved[0].device)
        for parameter, view in zip(self.moved, self._views(self._values)):
            view.copy_(parameter.detach())
            parameter.data = view
        self._addresses = [parameter.data_ptr() for parameter in self.moved]
        self.flat = self._values.detach().requires_grad_()
        """All parameters as one tensor, to which compiled losses lead (building_blocks/compilation.py)."""
        self._gradient, self._mean, self._square = (torch.zeros_like(self._values) for _ in range(3))
        self._gradients = self._views(self._gradient)
        self._steps = torch.zeros((), device=self._values.device)
        self._had: set[int] = set()
        """Indices in `moved` of parameters that have had a gradient."""

    def _views(self, flat: Tensor) -> list[Tensor]:
        """Returns each parameter's part of a tensor like `_values`, in its shape and memory order."""
        return [
            flat.as_strided(parameter.shape, parameter.stride(), start)
            for parameter, start in zip(self.moved, self._starts)
        ]

    def joined(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Returns the gradients of `moved` as one tensor like `flat`; a missing one is zero."""
        parts = []
        for parameter, gradient, start, end in zip(self.moved, gradients, self._starts, self._ends):
            if gradient is None:
                parts.append(parameter.new_zeros(end - start))
                continue
            order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
            flat = gradient.permute(order).reshape(-1)
            parts.append(nn.functional.pad(flat, (0, end - start - parameter.numel())))
        return torch.cat(parts)

    def note(self, there: Iterable[bool]) -> None:
        self._had.update(itertools.compress(itertools.count(), there))

    def zero_grad(self) -> None:
        self.flat.grad = None
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(
        self, learning_rate: float, max_norm: float | None = None, total: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Moves all parameters by their gradients, summed over ranks by `total`; a missing gradient is zero.

        Scales gradients with a norm above `max_norm` down to it, and returns the norm before. Raises `RuntimeError` if
        a parameter's memory was replaced, since it would no longer be learned.
        """
        if any(parameter.data_ptr() != address for parameter, address in zip(self.moved, self._addresses)):
            raise RuntimeError(
                "a parameter is not where its optimizer put it; move a network to its device, or copy it, "
                "before creating its optimizer"
            )
        found = {place: item.grad for place, item in enumerate(self.moved) if item.grad is not None}
        if self.flat.grad is not None:
            self._gradient.copy_(self.flat.grad)
        elif len(found) < len(self.moved):
            self._gradient.zero_()
        if found:
            into = [self._gradients[place] for place in found]
            (torch._foreach_copy_ if self.flat.grad is None else torch._foreach_add_)(into, list(found.values()))
        self._had.update(found)
        if total is not None:
            self._gradient.copy_(total(self._gradient))
        norm: Tensor = torch.linalg.vector_norm(self._gradient)
        if max_norm is not None:
            self._gradient.mul_((norm + 1e-6).reciprocal_().mul_(max_norm).clamp_(max=1.0))
        self._steps.add_(1)
        kernel = torch._fused_adamw_ if self._decay else torch._fused_adam_
        kernel(
            [self._values], [self._gradient], [self._mean], [self._square], [], [self._steps],
            lr=learning_rate, beta1=_BETA1, beta2=_BETA2, weight_decay=self._decay, eps=self._epsilon, amsgrad=False,
            maximize=False,
        )  # fmt: skip
        return norm

    def state(self) -> Columns:
        """Returns `<number>/step`, `…/exp_avg` and `…/exp_avg_sq` of each parameter that has had a gradient."""
        slots = {"step": [self._steps] * len(self.moved), "exp_avg": self._views(self._mean)}
        slots["exp_avg_sq"] = self._views(self._square)
        return {
            f"{self._numbers[place]}/{name}": views[place].cpu().numpy().copy()
            for place in sorted(self._had)
            for name, views in slots.items()
        }

    def load_state(self, arrays: Mapping[str, Array]) -> None:
        numbers = {int(key.partition("/")[0]) for key in arrays}
        if max(numbers, default=0) >= len(self.parameters):
            raise IndexError(f"a state of parameter {max(numbers)}, of {len(self.parameters)}")
        self._had = {self._numbers.index(number) for number in numbers if number in self._numbers}
        for flat, name in ((self._mean, "exp_avg"), (self._square, "exp_avg_sq")):
            flat.zero_()
            views = self._views(flat)
            for place in self._had:
                _put(views[place], f"{self._numbers[place]}/{name}", arrays)
        steps = (float(arrays[f"{self._numbers[place]}/step"]) for place in self._had)
        self._steps.fill_(max(steps, default=0.0))


def gradient_step(
    loss: Tensor, optimizer: Adam, learning_rate: float, max_norm: float | None,
    total: Callable[[Tensor], Tensor] | None = None, *, all_inputs: bool = False,
) -> Tensor:  # fmt: skip
    """Performs one step of the optimizer; returns the norm of the gradients, summed over ranks by `total`. They go to
    its parameters alone, or to `all_inputs` if the loss depends on no others."""
    optimizer.zero_grad()
    inputs = None if all_inputs else [*optimizer.parameters, optimizer.flat]
    loss.backward(inputs=inputs)  # type: ignore[no-untyped-call]
    return optimizer.step(learning_rate, max_norm, total)


@torch.no_grad()
def soft_update(target: nn.Module, online: nn.Module, tau: float) -> None:
    """target ← (1 − τ) target + τ online, parameters only."""
    torch._foreach_lerp_(list(target.parameters()), list(online.parameters()), tau)


def to_device(array: Array, device: torch.device) -> Tensor:
    """Returns a tensor on `device`; a GPU gets it through pinned memory, without waiting for the copy."""
    owned = array if array.flags.writeable else np.array(array)  # PyTorch knows no memory that is only read
    tensor = torch.from_numpy(owned)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Context in which networks compute in this precision; outputs, weights and losses stay float32."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)  # weights change while it lasts


class Stateful(Protocol):
    """An optimizer, or any other object with a state of named arrays."""

    def state(self) -> Columns: ...

    def load_state(self, arrays: Columns) -> None: ...


Part = nn.Module | Tensor | Stateful
"""An object with a state; a network's is its parameters."""


def state_of(parts: Mapping[str, Part]) -> Columns:
    """Returns copies of the state of all parts; each key prefixes the names of its arrays."""
    arrays: Columns = {}
    for prefix, item in parts.items():
        if isinstance(item, nn.Module | Tensor):
            arrays |= {prefix + name: tensor.detach().cpu().numpy().copy() for name, tensor in _tensors(item)}
        else:
            arrays |= {prefix + name: array for name, array in item.state().items()}
    return arrays


@torch.no_grad()
def load_state_of(parts: Mapping[str, Part], arrays: Mapping[str, Array]) -> None:
    """Restores `state_of`; raises `KeyError`, `IndexError` or `ValueError` for another network's."""
    left = dict(arrays)
    for prefix in sorted(parts, reverse=True):  # the longer of two nested prefixes first
        item, own = parts[prefix], {name: left.pop(name) for name in arrays if name in left and name.startswith(prefix)}
        if isinstance(item, nn.Module | Tensor):
            for name, tensor in _tensors(item):
                _put(tensor, prefix + name, own)
        else:
            item.load_state(part(own, prefix))


def part(arrays: Mapping[str, Array], prefix: str) -> Columns:
    """Returns the arrays under a prefix, named without it."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _tensors(item: nn.Module | Tensor) -> Iterable[tuple[str, Tensor]]:
    return [("", item)] if isinstance(item, Tensor) else item.named_parameters()


def _put(tensor: Tensor, name: str, arrays: Mapping[str, Array]) -> None:
    array = arrays[name]
    if array.shape != tuple(tensor.shape):
        raise ValueError(f"{name} has the shape {array.shape}, expected {tuple(tensor.shape)}")
    tensor.copy_(torch.from_numpy(np.array(array)))
