"""Losses for distributions of returns: c51's projection, and quantile regression. Pure functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def project(probabilities: Tensor, reward: Tensor, discount: Tensor, support: Tensor) -> Tensor:
    """Φ T̂ Z (Bellemare et al. 2017, alg. 1): the distribution of reward + discount · Z, put on the atoms of Z.

    `probabilities` `[B, N]` of Z at the atoms `support` `[N]` (equally spaced); `reward` and `discount` `[B]`; answers
    `[B, N]`. Each atom gets what lies within one spacing of it, the nearer the more: as a dense sum, because to scatter
    would add up in an order of its own on a GPU.
    """
    low, high, spacing = support[0], support[-1], support[1] - support[0]
    moved = (reward.unsqueeze(1) + discount.unsqueeze(1) * support).clamp(low, high)
    share = (1 - (moved.unsqueeze(1) - support.unsqueeze(1)).abs() / spacing).clamp_min(0)
    projected: Tensor = (share * probabilities.unsqueeze(1)).sum(dim=2)
    return projected


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """`[B]`: −Σ target log softmax(logits), both `[B, N]`."""
    found: Tensor = -(target * logits.log_softmax(dim=1)).sum(dim=1)
    return found


def divergence(logits: Tensor, target: Tensor) -> Tensor:
    """`[B]`: KL(target ‖ softmax(logits)), which Rainbow takes for the priority; never below 0."""
    found: Tensor = cross_entropy(logits, target) + torch.special.xlogy(target, target).sum(dim=1)
    return found.clamp_min(0)


def quantile_huber(quantiles: Tensor, target: Tensor) -> Tensor:
    """`[B]`: Σ_i mean_j |τ_i − 1{u_ij < 0}| L(u_ij), u_ij = target_j − quantiles_i, L Huber's loss with κ = 1.

    Dabney et al. 2018, eq. 10 and alg. 1; `[B, N]` and `[B, M]`; τ_i = (i + ½) / N.
    """
    count = quantiles.shape[1]
    midpoints = (torch.arange(count, device=quantiles.device) + 0.5) / count
    error = target.unsqueeze(1) - quantiles.unsqueeze(2)
    huber = torch.where(error.abs() <= 1, 0.5 * error.square(), error.abs() - 0.5)
    side = (midpoints.reshape(1, -1, 1) - (error.detach() < 0).to(error.dtype)).abs()
    return (side * huber).mean(dim=2).sum(dim=1)
