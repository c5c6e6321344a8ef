"""A linear layer with factorised Gaussian noise on its weights (Fortunato et al. 2018, §3.1 b).

y = (μ_w + σ_w · f(ε_out) f(ε_in)ᵀ) x + μ_b + σ_b · f(ε_out), f(ε) = sgn(ε) √|ε|. The noise is an argument, not a state:
whoever acts or learns draws it with a generator of its own, and who gives none acts with the means.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

LayerNoise = tuple[Tensor, Tensor]
"""f(ε_in) and f(ε_out) of one layer."""


class NoisyLinear(nn.Module):
    """In place of `nn.Linear`."""

    def __init__(self, inputs: int, outputs: int, sigma: float) -> None:
        """`sigma` is σ₀ of the paper."""
        super().__init__()
        bound = 1 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(outputs, inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-bound, bound))
        self.weight_sigma = nn.Parameter(torch.full((outputs, inputs), sigma * bound))
        self.bias_sigma = nn.Parameter(torch.full((outputs,), sigma * bound))

    def draw(self, generator: torch.Generator) -> LayerNoise:
        """Noise for this layer; the generator's device may be another one."""
        outputs, inputs = self.weight.shape
        drawn = torch.randn(inputs + outputs, generator=generator, device=generator.device).to(self.weight.device)
        shaped = drawn.sign() * drawn.abs().sqrt()
        return shaped[:inputs], shaped[inputs:]

    def forward(self, values: Tensor, noise: LayerNoise | None = None) -> Tensor:
        """`[B, inputs]` → `[B, outputs]`."""
        if noise is None:
            return nn.functional.linear(values, self.weight, self.bias)
        inwards, outwards = noise
        weight = self.weight + self.weight_sigma * torch.outer(outwards, inwards)
        return nn.functional.linear(values, weight, self.bias + self.bias_sigma * outwards)
