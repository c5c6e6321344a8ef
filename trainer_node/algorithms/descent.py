"""Gradient steps: what algorithms do with a loss, and what they tell of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from trainer_node.algorithms.adam import Adam
from trainer_node.algorithms.share import Share


def descend(
    loss: Tensor, parameters: Sequence[Tensor], optimiser: Adam, learning_rate: float, max_norm: float | None
) -> Tensor:
    """One step of the optimiser that has these parameters; answers the norm of their gradients as they were."""
    optimiser.zero_grad()
    loss.backward(inputs=list(parameters))  # type: ignore[no-untyped-call]
    return optimiser.step(learning_rate, max_norm)


def figures(
    share: Share, history: Sequence[Mapping[str, Tensor]], norms: Sequence[Tensor] = ()
) -> list[dict[str, float]]:
    """The terms of each gradient step (at least one) over its whole minibatch, and the norm of its gradients.

    Read at the end of an update: to look at a tensor waits for the device.
    """
    table = share.total(torch.stack([torch.stack(list(terms.values())) for terms in history]))
    rows: list[dict[str, float]] = [dict(zip(history[0], values, strict=True)) for values in table.tolist()]
    for row, norm in zip(rows, torch.stack(list(norms)).tolist() if norms else ()):
        row["train/grad_norm"] = norm
    return rows


@torch.no_grad()
def follow(target: nn.Module, online: nn.Module, tau: float) -> None:
    """target ← (1 − τ) target + τ online, parameters only."""
    torch._foreach_lerp_(list(target.parameters()), list(online.parameters()), tau)
