"""Generalised advantage estimation (Schulman et al. 2016, eq. 16), with termination and truncation kept apart."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Estimate(Protocol):
    """A way to make advantages and targets, both `[T, S]`, of one reward signal; the arguments of `advantages`."""

    def __call__(
        self,
        *,
        reward: Tensor,
        value: Tensor,
        bootstrap_value: Tensor,
        terminated: Tensor,
        truncated: Tensor,
        mask: Tensor,
        final_index: Tensor,
        final_value: Tensor,
        gamma: float,
    ) -> tuple[Tensor, Tensor]:
        """Advantages, and what the value learns."""
        ...


def by_gae(gae_lambda: float) -> Estimate:
    """By generalised advantage estimation."""

    def estimate(*, value: Tensor, gamma: float, **ends: Tensor) -> tuple[Tensor, Tensor]:
        advantage = advantages(value=value, **ends, gamma=gamma, gae_lambda=gae_lambda)
        return advantage, advantage + value

    return estimate


def advantages(
    *,
    reward: Tensor,
    value: Tensor,
    bootstrap_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    mask: Tensor,
    final_index: Tensor,
    final_value: Tensor,
    gamma: float,
    gae_lambda: float,
) -> Tensor:
    """Advantages `[T, S]`, zero where `mask` is false.

    `reward`, `value`, `terminated`, `truncated`, `mask`: `[T, S]`; `bootstrap_value`: `[S]`, the value after the last
    step; `final_index`: `[M, 2]` (step, slot) and `final_value`: `[M]`, the value of each true last observation.
    The value that follows a step is 0 after termination, `final_value` after truncation, and otherwise
    the next step's: δ_t = r_t + γ V_{t+1} − V_t, and A_t = δ_t + γ λ A_{t+1} inside an episode.
    """
    following = following_values(value, bootstrap_value, terminated, final_index, final_value)
    delta = (reward + gamma * following - value) * mask
    goes_on = (gamma * gae_lambda) * (~(terminated | truncated) & mask).to(value.dtype)
    return discounted_sums(delta, goes_on)


def following_values(
    value: Tensor, bootstrap_value: Tensor, terminated: Tensor, final_index: Tensor, final_value: Tensor
) -> Tensor:
    """`[T, S]`: what comes after each step is worth, as `advantages` says."""
    following = torch.cat([value[1:], bootstrap_value.unsqueeze(0)])
    following[final_index[:, 0], final_index[:, 1]] = final_value
    return following.masked_fill(terminated, 0.0)


def discounted_sums(delta: Tensor, goes_on: Tensor) -> Tensor:
    """x_t = δ_t + g_t x_{t+1} along the first axis, with nothing after the last step."""
    result = torch.empty_like(delta)
    running = torch.zeros_like(delta[0])
    rows = zip(delta.unbind(), goes_on.unbind(), result.unbind(), strict=True)
    for own, share, into in reversed(list(rows)):
        running = torch.addcmul(own, share, running, out=into)
    return result
