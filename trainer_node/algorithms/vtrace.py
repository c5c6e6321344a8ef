"""V-trace (Espeholt et al. 2018, eq. 1 and remark 2): values of a policy from what an older one has acted."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trainer_node.algorithms.gae import discounted_sums, following_values


class VTrace(NamedTuple):
    """All `[T, S]`; where `mask` is false, the target is the value and the rest is zero."""

    target: Tensor
    """v_t, what the value learns."""
    advantage: Tensor
    """r_t + γ v_{t+1} − V_t, not weighted yet."""
    weight: Tensor
    """ρ_t, what the advantage weighs in the policy's gradient."""


def vtrace(
    *,
    log_ratio: Tensor,
    reward: Tensor,
    value: Tensor,
    bootstrap_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    mask: Tensor,
    final_index: Tensor,
    final_value: Tensor,
    gamma: float,
    vtrace_lambda: float,
    rho_bar: float,
    c_bar: float,
) -> VTrace:
    """Targets, advantages and weights for the policy whose `log_ratio` to the one that acted is given, `[T, S]`.

    The rest is as in `gae.advantages`. With ρ_t = min(ρ̄, ratio) and c_t = λ min(c̄, ratio): δ_t = ρ_t (r_t + γ V_{t+1} −
    V_t), and v_t = V_t + δ_t + γ c_t (v_{t+1} − V_{t+1}) inside an episode. What follows an end or the last step is not
    corrected: there v_{t+1} is V_{t+1}, which is 0 after termination.
    """
    ratio = log_ratio.exp()
    weight = ratio.clamp_max(rho_bar) * mask
    following = following_values(value, bootstrap_value, terminated, final_index, final_value)
    inside = (~(terminated | truncated) & mask).to(value.dtype)
    delta = weight * (reward + gamma * following - value)
    correction = discounted_sums(delta, gamma * vtrace_lambda * ratio.clamp_max(c_bar) * inside)
    after = torch.cat([correction[1:], torch.zeros_like(correction[:1])])
    return VTrace(
        target=value + correction,
        advantage=(reward + gamma * (following + inside * after) - value) * mask,
        weight=weight,
    )
