"""Opponents with equal networks act together, in one batched forward pass.

The result depends only on the players and their slots, so a successor in the same matches acts the same.
"""

import numpy as np
import torch
from torch import Tensor, nn

from stagecoach.rollout_worker.exploration.base import Exploration, Sampling, act_for
from stagecoach.shared.experience.spaces import Array, Columns
from stagecoach.shared.policies.actor_critic import ActorCritic
from stagecoach.shared.policies.encoders import RunningMoments
from stagecoach.shared.policies.policy import Policy, copy_sharing_buffers
from stagecoach.shared.policies.q_network import QNetwork

MOST_WEIGHTS = 1 << 16
"""Size of the largest network that is stacked, which copies its weights; two layers of 256 would not be faster."""
_CRITIC = ("critic", "value_head", "value_scale")
_SAMPLING = Sampling()
Weights = dict[str, Tensor]
"""A policy's parameters and buffers, by name."""


def likeness(policy: Policy) -> str:
    """Returns a text that is equal for policies that can act together; empty for one that cannot."""
    layers = _layers(policy).values()
    fit = type(policy) in (ActorCritic, QNetwork) and {type(its) for its in layers} <= {nn.Linear, RunningMoments}
    small = sum(tensor.numel() for its in layers for tensor in its.parameters()) <= MOST_WEIGHTS
    return f"{policy} {policy.network} {policy.config} {policy.spaces}" if fit and small else ""


def _layers(policy: Policy) -> dict[str, nn.Module]:
    acting = {name: its for name, its in policy.named_modules() if name and not name.startswith(_CRITIC)}
    return {name: its for name, its in acting.items() if [*its.parameters(False), *its.buffers(False)]}


class _Layer(nn.Module):
    """One layer of K networks, for rows `[K · R, …]`, grouped by network."""

    def __init__(self, name: str, linear: bool, networks: list[Weights]) -> None:
        super().__init__()
        self._linear, self._networks = linear, networks
        self._names = [f"{name}.{tensor}" for tensor in (("bias", "weight") if linear else ("shift", "scale", "bound"))]

    def forward(self, values: Tensor) -> Tensor:
        count = len(self._networks)
        rows = values.reshape(count, -1, values.shape[-1])
        first, second, *bound = (torch.stack([its[name] for its in self._networks]) for name in self._names)
        if self._linear:
            return torch.baddbmm(first.unsqueeze(1), rows, second.mT).flatten(0, 1)
        most = bound[0].reshape(count, 1, 1)
        return torch.clamp((rows - first.unsqueeze(1)) * second.unsqueeze(1), -most, most).flatten(0, 1)


class Stacked:
    def __init__(self, policy: Policy) -> None:
        """Stacks policies of the same `likeness` as this one."""
        self._networks: list[Weights] = []
        self._policy = copy_sharing_buffers(policy)
        for name, module in _layers(policy).items():
            self._policy.set_submodule(name, _Layer(name, isinstance(module, nn.Linear), self._networks))

    def act(
        self, networks: list[Weights], rows: list[Array], observations: Columns, generator: torch.Generator,
        acting: Exploration = _SAMPLING,
    ) -> Columns:  # fmt: skip
        """Returns actions `[R, …]` of each network for its slots of observations `[S, …]`, grouped by network."""
        self._networks[:], most = networks, max(map(len, rows))
        there = np.arange(most) < np.array([len(its) for its in rows])[:, None]
        filled = np.zeros(there.shape, np.int64)  # as many rows for each; the padding is left out below
        filled[there] = np.concatenate(rows)
        if isinstance(self._policy, ActorCritic) and len(self._policy.log_std):
            each = torch.stack([its["log_std"] for its in networks]).repeat_interleave(most, 0)
            self._policy.log_std = nn.Parameter(each, requires_grad=False)
        actions, _ = act_for(acting, self._policy, observations, filled.ravel(), generator)
        return {name: array[there.ravel()] for name, array in actions.items()}
