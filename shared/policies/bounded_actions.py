"""Actions of bounded boxes: flat and in [-1, 1], as networks have them, and as columns in the environment's units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from shared.errors import UnsupportedSpace
from shared.spaces import SpaceSpec


class BoundedActions(nn.Module):
    """All box leaves of an action space beside each other; raises `UnsupportedSpace` for leaves that are none.

    The bounds follow from the space, so they do not travel with the weights.
    """

    def __init__(self, action: SpaceSpec) -> None:
        super().__init__()
        lows, highs = [], []
        for leaf in action.leaves:
            where, need = leaf.path or "space", "continuous actions need Boxes of floats with finite bounds"
            if leaf.kind != "box" or leaf.dtype not in {"float32", "float64"}:
                raise UnsupportedSpace(f"action {where}: {leaf.kind} of {leaf.dtype}; {need}")
            low, high = leaf.bounds()
            if not (np.isfinite(high - low).all() and (low < high).all()):
                raise UnsupportedSpace(
                    f"action {where}: bounds {list(leaf.low)} to {list(leaf.high)}; {need}. Let the environment or a "
                    f"wrapper set them, or use algorithm: ppo"
                )
            lows.append(torch.from_numpy(low).reshape(-1))
            highs.append(torch.from_numpy(high).reshape(-1))
        lower, upper = torch.cat(lows), torch.cat(highs)
        self.names = action.column_names("action")
        self._shapes = [leaf.shape for leaf in action.leaves]
        self._sizes = [leaf.size for leaf in action.leaves]
        self.size = sum(self._sizes)
        """Elements of all leaves together (D)."""
        self.register_buffer("middle", (lower + upper) / 2, persistent=False)
        self.register_buffer("scale", (upper - lower) / 2, persistent=False)
        self.log_volume = float(torch.log(((upper - lower) / 2).to(torch.float64)).sum())
        """What a log density in [-1, 1] is more than one in the environment's units."""

    def columns(self, flat: Tensor) -> dict[str, Tensor]:
        """`[B, D]` in [-1, 1] → action columns."""
        middle, scale = cast(Tensor, self.middle), cast(Tensor, self.scale)
        parts = torch.split_with_sizes(torch.addcmul(middle, flat, scale), self._sizes, dim=-1)
        return {
            name: part.reshape(-1, *shape) for name, part, shape in zip(self.names, parts, self._shapes, strict=True)
        }

    def flat(self, actions: Mapping[str, Tensor]) -> Tensor:
        """The inverse of `columns`, float32."""
        parts = [actions[name].reshape(-1, size) for name, size in zip(self.names, self._sizes, strict=True)]
        joined = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).to(torch.float32)
        return (joined - cast(Tensor, self.middle)) / cast(Tensor, self.scale)
