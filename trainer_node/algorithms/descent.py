"""Gradient steps: what algorithms do with a loss, and what they tell of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from trainer_node.algorithms.adam import Adam
from trainer_node.algorithms.share import Share


def descend(
    loss: Tensor, parameters: Sequence[Tensor] | None, optimiser: Adam, learning_rate: float, max_norm: float | None
) -> Tensor:
    """One step of the optimiser that has these parameters; answers the norm of their gradients as they were.

    None: all that the loss depends on, where it depends on no others.
    """
    optimiser.zero_grad()
    loss.backward(inputs=None if parameters is None else list(parameters))  # type: ignore[no-untyped-call]
    return optimiser.step(learning_rate, max_norm)


def figures(
    share: Share, history: Sequence[Mapping[str, Tensor]], alike: Mapping[str, Sequence[Tensor]]
) -> list[dict[str, float]]:
    """A row for each gradient step (at least one): its terms over the whole minibatch, and what all ranks know alike.

    Read at the end of an update: to look at a tensor waits for the device.
    """
    table = share.total(torch.stack([torch.stack(list(terms.values())) for terms in history]))
    rows: list[dict[str, float]] = [dict(zip(history[0], values, strict=True)) for values in table.tolist()]
    for name, values in alike.items():
        for row, value in zip(rows, torch.stack(list(values)).tolist() if values else ()):
            row[name] = value
    return rows


@torch.no_grad()
def follow(target: nn.Module, online: nn.Module, tau: float) -> None:
    """target ← (1 − τ) target + τ online, parameters only."""
    torch._foreach_lerp_(list(target.parameters()), list(online.parameters()), tau)
