"""tanh as 2σ(2x) − 1: on a CPU PyTorch's own tanh takes four times as long, a third of a small network's gradient step.

It differs from tanh by at most 2e-7, and is the same in acting and in learning.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_MINUS_ONE = torch.tensor(-1.0)


class Tanh(nn.Module):
    """Elementwise, for float32 on a CPU; elsewhere, and where a policy is exported, PyTorch's own."""

    def forward(self, values: Tensor) -> Tensor:
        """As large as `values`."""
        if values.dtype != torch.float32 or values.device.type != "cpu" or torch.compiler.is_compiling():
            return torch.tanh(values)
        if torch.is_grad_enabled() and values.requires_grad:
            learnt: Tensor = _Tanh.apply(values)  # type: ignore[no-untyped-call]
            return learnt
        return _tanh(values)


class _Tanh(torch.autograd.Function):
    """With tanh's own derivative, 1 − y², in one pass."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        result = _tanh(values)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        result: Tensor = torch.ops.aten.tanh_backward(gradient, ctx.saved_tensors[0])
        return result


def _tanh(values: Tensor) -> Tensor:
    result = values.mul(2.0).sigmoid_()
    return torch.add(_MINUS_ONE, result, alpha=2.0, out=result)
