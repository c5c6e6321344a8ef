"""Actions as vectors that networks can take in and guess: choices one-hot, boxes between their bounds."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from shared.spaces import Leaf, SpaceSpec


class ActionEncoding(nn.Module):
    """Action columns `[B, …]` → `[B, size]`, float32."""

    def __init__(self, action: SpaceSpec) -> None:
        super().__init__()
        self._leaves = action.leaves
        self.size = sum(sum(leaf.nvec) or leaf.size for leaf in action.leaves)
        for number, leaf in enumerate(action.leaves):
            if leaf.kind == "box":
                for name, bound in zip(("low", "high"), leaf.bounds(), strict=True):
                    self.register_buffer(f"{name}{number}", torch.from_numpy(bound.reshape(-1)), persistent=False)

    def forward(self, actions: Mapping[str, Tensor]) -> Tensor:
        """One-hot choices; boxes clipped to their bounds, as the environment takes them, and rescaled to [-1, 1] where
        both bounds are finite.
        """
        parts = []
        for number, leaf in enumerate(self._leaves):
            values = actions[leaf.column("action")].reshape(-1, len(leaf.nvec) or leaf.size)
            parts += [self._box(number, values)] if leaf.kind == "box" else _one_hot(values, leaf)
        return torch.cat(parts, dim=1)

    def _box(self, number: int, values: Tensor) -> Tensor:
        low, high = self.get_buffer(f"low{number}"), self.get_buffer(f"high{number}")
        clipped, span = values.to(torch.float32).clamp(low, high), high - low
        return torch.where(span.isfinite() & (span > 0), 2 * (clipped - low) / span - 1, clipped)

    def errors(self, guessed: Tensor, actions: Tensor) -> Tensor:
        """`[B]`: how wrong a network's outputs are about encoded actions: cross-entropy of each choice plus half the
        squared error of each element of a box.
        """
        total, at = torch.zeros(len(guessed), device=guessed.device), 0
        for leaf in self._leaves:
            for size in leaf.nvec or (leaf.size,):
                found, wanted = guessed[:, at : at + size], actions[:, at : at + size]
                if leaf.kind == "box":
                    total = total + 0.5 * (found - wanted).square().sum(dim=1)
                else:
                    total = total - (wanted * found.log_softmax(dim=1)).sum(dim=1)
                at += size
        return total


def _one_hot(values: Tensor, leaf: Leaf) -> list[Tensor]:
    choices = np.asarray(leaf.nvec).tolist()
    return [nn.functional.one_hot(values[:, i], n).to(torch.float32) for i, n in enumerate(choices)]
