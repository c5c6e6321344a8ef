"""Ways to explore with choices, from the values that a policy tells of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import numpy as np
import torch
from torch import Tensor

from rollout_worker.exploration import Exploration, uniform_choice
from shared.policies.policy import Policy
from shared.policies.q_network import QNetwork

_WHICH_HEAD = 1
"""Tells this use of an episode's seed from the environment's own."""


class EpsilonGreedy(Exploration):
    """A uniform joint choice with probability ε, else the best one."""

    def __init__(self, epsilon: float) -> None:
        self._epsilon = epsilon

    def values(self, policy: Policy, observations: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
        """`[S, P]`: what the best one is the best by."""
        return policy.exploring_parameters(observations, generator)

    def act(
        self, policy: Policy, observations: Mapping[str, Tensor], generator: torch.Generator
    ) -> tuple[dict[str, Tensor], Tensor]:
        params = self.values(policy, observations, generator)
        best = policy.distribution.mode(params)
        rows, device = len(params), params.device
        anyhow = torch.rand(rows, generator=generator, device=device) < self._epsilon
        actions = {}
        for leaf in policy.spaces.action.leaves:
            name = leaf.column("action")
            chosen = uniform_choice(leaf, torch.rand((rows, *leaf.shape), generator=generator, device=device))
            actions[name] = torch.where(anyhow.reshape(-1, *[1] * len(leaf.shape)), chosen, best[name])
        return actions, params

    def log_prob(self, policy: Policy, params: Tensor, actions: Mapping[str, Tensor]) -> Tensor:
        best = policy.distribution.mode(params)
        leaves = policy.spaces.action.leaves
        names = [leaf.column("action") for leaf in leaves]
        same = torch.stack([(actions[name] == best[name]).reshape(len(params), -1).all(dim=1) for name in names]).all(
            dim=0
        )
        each = self._epsilon / math.prod(math.prod(leaf.nvec) for leaf in leaves)
        return torch.where(same, 1.0 - self._epsilon + each, max(each, 1e-38)).log()


class UpperConfidenceBound(EpsilonGreedy):
    """The best choice by mean + coefficient · deviation over the heads of an ensemble (Chen et al. 2017)."""

    def __init__(self, coefficient: float, epsilon: float) -> None:
        super().__init__(epsilon)
        self._coefficient = coefficient

    def values(self, policy: Policy, observations: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
        heads = cast(QNetwork, policy).head_values(observations)
        return heads.mean(dim=0) + self._coefficient * heads.std(dim=0, correction=0)


class OneHead(EpsilonGreedy):
    """The best choice by one head of an ensemble, the same for the whole of an episode (Osband et al. 2016).

    Which one follows from the episode's seed, so that whoever takes the episode up acts by the same one. Agents of one
    environment act by the same head. Probabilities are those of this head's choices.
    """

    knows_episodes = True

    def __init__(self, epsilon: float) -> None:
        super().__init__(epsilon)
        self._numbers: dict[int, int] = {}

    def begin(self, environment: int, seed: int) -> None:
        self._numbers[environment] = int(np.random.SeedSequence([seed, _WHICH_HEAD]).generate_state(1)[0])

    def values(self, policy: Policy, observations: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
        heads = cast(QNetwork, policy).head_values(observations)
        count, slots = heads.shape[:2]
        numbers = torch.tensor([self._numbers[environment] for environment in range(len(self._numbers))])
        chosen = (numbers % count).repeat(slots // len(numbers)).to(heads.device)
        return heads[chosen, torch.arange(slots, device=heads.device)]


class Boltzmann(Exploration):
    """Draws a choice with probability softmax(values / temperature)."""

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature

    def act(
        self, policy: Policy, observations: Mapping[str, Tensor], generator: torch.Generator
    ) -> tuple[dict[str, Tensor], Tensor]:
        values = policy.exploring_parameters(observations, generator)
        gumbel = -torch.empty_like(values).exponential_(generator=generator).log_()
        return policy.distribution.mode(values / self._temperature + gumbel), values

    def log_prob(self, policy: Policy, params: Tensor, actions: Mapping[str, Tensor]) -> Tensor:
        (name,) = policy.spaces.action.column_names("action")
        shares = torch.log_softmax(params / self._temperature, dim=1)
        return shares.gather(1, actions[name].reshape(-1, 1)).squeeze(1)
