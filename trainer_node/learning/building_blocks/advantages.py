"""Advantages and value targets: generalized advantage estimation, and V-trace for experience of older policies."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Trajectories:
    """Rewards of T steps of S slots and their value estimates; `[T, S]` unless noted."""

    reward: Tensor
    value: Tensor
    bootstrap_value: Tensor
    """`[S]`: the value after the last step."""
    terminated: Tensor
    truncated: Tensor
    mask: Tensor
    """False for steps without an action."""
    final_index: Tensor
    """`[M, 2]`, int64: step and slot of each known last observation."""
    final_value: Tensor
    """`[M]`: their values."""
    gamma: float

    def following(self) -> Tensor:
        """Returns V_{t+1} `[T, S]`: 0 after termination, `final_value` after truncation, else the next value."""
        following = torch.cat([self.value[1:], self.bootstrap_value.unsqueeze(0)])
        following[self.final_index[:, 0], self.final_index[:, 1]] = self.final_value
        return following.masked_fill(self.terminated, 0.0)

    def inside(self) -> Tensor:
        """Returns `[T, S]`: 1 if the next step belongs to the same episode, else 0."""
        return (~(self.terminated | self.truncated) & self.mask).to(self.value.dtype)


Estimate = Callable[[Trajectories], tuple[Tensor, Tensor]]
"""Advantages and value targets, both `[T, S]`, of one reward signal."""


def gae(of: Trajectories, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """Returns advantages `[T, S]`, zero without a step, and value targets (Schulman et al. 2016, eq. 16).

    δ_t = r_t + γ V_{t+1} − V_t, and A_t = δ_t + γ λ A_{t+1} inside an episode; the target is A_t + V_t.
    """
    delta = (of.reward + of.gamma * of.following() - of.value) * of.mask
    advantage = _discounted_sums(delta, (of.gamma * gae_lambda) * of.inside())
    return advantage, advantage + of.value


class VTrace(NamedTuple):
    """V-trace, all `[T, S]`; without a step, the target is the value and the rest is zero."""

    target: Tensor
    """v_t, what the value learns."""
    advantage: Tensor
    """r_t + γ v_{t+1} − V_t, without ρ_t."""
    weight: Tensor
    """ρ_t, what the advantage weighs in the policy's gradient."""


def vtrace(of: Trajectories, log_ratio: Tensor, vtrace_lambda: float, rho_bar: float, c_bar: float) -> VTrace:
    """Returns V-trace for `log_ratio` `[T, S]`, ln π/b of the actions (Espeholt et al. 2018, eq. 1, remark 2).

    With ρ_t = min(ρ̄, ratio) and c_t = λ min(c̄, ratio): δ_t = ρ_t (r_t + γ V_{t+1} − V_t), and v_t = V_t + δ_t +
    γ c_t (v_{t+1} − V_{t+1}) inside an episode. After an end or the last step, v_{t+1} is V_{t+1}.
    """
    ratio, following, inside = log_ratio.exp(), of.following(), of.inside()
    weight = ratio.clamp_max(rho_bar) * of.mask
    delta = weight * (of.reward + of.gamma * following - of.value)
    correction = _discounted_sums(delta, of.gamma * vtrace_lambda * ratio.clamp_max(c_bar) * inside)
    after = torch.cat([correction[1:], torch.zeros_like(correction[:1])])
    advantage = (of.reward + of.gamma * (following + inside * after) - of.value) * of.mask
    return VTrace(of.value + correction, advantage, weight)


def _discounted_sums(delta: Tensor, share: Tensor) -> Tensor:
    """Returns x_t = δ_t + g_t x_{t+1} along the first axis, with x = 0 after the last step."""
    result = torch.empty_like(delta)
    running = torch.zeros_like(delta[0])
    rows = zip(delta.unbind(), share.unbind(), result.unbind(), strict=True)
    for own, part, into in reversed(list(rows)):
        running = torch.addcmul(own, part, running, out=into)
    return result
