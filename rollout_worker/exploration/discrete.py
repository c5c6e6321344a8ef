"""Explorations of discrete actions, by the values that a policy gives them."""

import math
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from torch import Tensor

from stagecoach.rollout_worker.exploration.base import Acted, Exploration, Tensors, legal_by_leaf, uniform_choice
from stagecoach.shared.policies.masks import ILLEGAL
from stagecoach.shared.policies.policy import Policy
from stagecoach.shared.policies.q_network import QNetwork

_WHICH_HEAD = 1
"""Distinguishes this use of an episode's seed from the environment's."""


@dataclass
class EpsilonGreedy(Exploration):
    """Takes a uniform joint choice with probability ε, else the best one."""

    epsilon: float

    def values(self, policy: Policy, observations: Tensors, generator: torch.Generator) -> Tensor:
        """Returns the values `[S, P]` that determine the best choice."""
        return policy.exploring_parameters(observations, generator)

    def act(self, policy: Policy, observations: Tensors, generator: torch.Generator) -> Acted:
        params = self.values(policy, observations, generator)
        actions = policy.distribution.mode(params)
        rows, device = len(params), params.device
        anyhow = torch.rand(rows, generator=generator, device=device) < self.epsilon
        legal = legal_by_leaf(observations, policy.spaces)
        for leaf in policy.spaces.action.leaves:
            name = leaf.column("action")
            uniform = torch.rand((rows, *leaf.shape), generator=generator, device=device)
            chosen = uniform_choice(leaf, uniform, None if legal is None else next(legal))
            actions[name] = torch.where(anyhow.reshape(-1, *[1] * len(leaf.shape)), chosen, actions[name])
        return actions, params

    def log_prob(self, policy: Policy, params: Tensor, actions: Tensors) -> Tensor:
        best, leaves = policy.distribution.mode(params), policy.spaces.action.leaves
        same = params.new_ones(len(params), dtype=torch.bool)
        for name in policy.spaces.action.column_names("action"):
            same &= (actions[name] == best[name]).reshape(len(params), -1).all(dim=1)
        if not policy.spaces.observation.mask_columns:
            each = self.epsilon / math.prod(math.prod(leaf.nvec) for leaf in leaves)
            return torch.where(same, 1.0 - self.epsilon + each, max(each, 1e-38)).log()
        parts = torch.split(params, [choices for leaf in leaves for choices in leaf.nvec], dim=1)
        counts = [(part > ILLEGAL / 2).sum(dim=1).clamp_min(1) for part in parts]
        shares = self.epsilon / torch.stack(counts).prod(dim=0).to(params.dtype)
        return torch.where(same, 1.0 - self.epsilon + shares, shares.clamp_min(1e-38)).log()


@dataclass
class UpperConfidenceBound(EpsilonGreedy):
    """Takes the best choice by mean + coefficient · deviation over the heads of an ensemble (Chen et al. 2017)."""

    coefficient: float

    def values(self, policy: Policy, observations: Tensors, generator: torch.Generator) -> Tensor:
        heads = cast(QNetwork, policy).head_values(observations)
        return heads.mean(dim=0) + self.coefficient * heads.std(dim=0, correction=0)


@dataclass
class OneHead(EpsilonGreedy):
    """Takes the best choice by one head of an ensemble, the same for a whole episode (Osband et al. 2016). It follows
    from the episode's seed, and all agents of one environment share it."""

    knows_episodes = by_slot = True
    _numbers: dict[int, int] = field(default_factory=dict)

    def begin(self, environment: int, seed: int) -> None:
        self._numbers[environment] = int(np.random.SeedSequence([seed, _WHICH_HEAD]).generate_state(1)[0])

    def values(self, policy: Policy, observations: Tensors, generator: torch.Generator) -> Tensor:
        heads = cast(QNetwork, policy).head_values(observations)
        count, slots = heads.shape[:2]
        numbers = torch.tensor([self._numbers[environment] for environment in range(len(self._numbers))])
        chosen = (numbers % count).repeat(slots // len(numbers)).to(heads.device)
        return heads[chosen, torch.arange(slots, device=heads.device)]


@dataclass
class Boltzmann(Exploration):
    """Draws a choice with probability softmax(values / temperature)."""

    temperature: float

    def act(self, policy: Policy, observations: Tensors, generator: torch.Generator) -> Acted:
        values = policy.exploring_parameters(observations, generator)
        gumbel = -torch.empty_like(values).exponential_(generator=generator).log_()
        return policy.distribution.mode(values / self.temperature + gumbel), values

    def log_prob(self, policy: Policy, params: Tensor, actions: Tensors) -> Tensor:
        (name,) = policy.spaces.action.column_names("action")
        shares = torch.log_softmax(params / self.temperature, dim=1)
        return shares.gather(1, actions[name].reshape(-1, 1)).squeeze(1)
