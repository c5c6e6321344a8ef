"""Running mean and variance of observations, as buffers of the policy: they travel with the weights, never apart."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

_EPSILON = 1e-8


class RunningMoments(nn.Module):
    """Normalises `[B, size]` to zero mean and unit variance; the identity until it has seen anything.

    Moments are float64, merged batch by batch (Chan et al. 1979), so that their order in the log alone decides them.
    """

    def __init__(self, size: int, clip: float) -> None:
        super().__init__()
        self._clip = clip
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("m2", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("shift", torch.zeros(size))
        self.register_buffer("scale", torch.ones(size))
        self.register_buffer("bound", torch.full((), float("inf")))

    def forward(self, values: Tensor) -> Tensor:
        """(x − mean) / σ, clipped."""
        shift, scale, bound = (cast(Tensor, getattr(self, name)) for name in ("shift", "scale", "bound"))
        return torch.clamp((values - shift) * scale, -bound, bound)

    @torch.no_grad()
    def update(self, values: Tensor) -> None:
        """Takes in a batch `[B, …]` of `size` elements each."""
        if len(values) == 0:
            return
        count, mean, m2 = (cast(Tensor, getattr(self, name)) for name in ("count", "mean", "m2"))
        batch = values.to(torch.float64).reshape(len(values), mean.numel())
        batch_mean = batch.mean(dim=0)
        delta = batch_mean - mean
        total = count + len(batch)
        m2 += (batch - batch_mean).square().sum(dim=0) + delta.square() * (count * len(batch) / total)
        mean += delta * (len(batch) / total)
        count.copy_(total)
        variance = m2 / total
        cast(Tensor, self.shift).copy_(mean)
        cast(Tensor, self.scale).copy_((variance + _EPSILON).rsqrt())
        cast(Tensor, self.bound).fill_(self._clip)
