"""How a policy's outputs become actions: greedy, random (heat-up), or as the algorithm explores.

An exploration is made for each fragment, from the counters that came with the policy version: everything random in it
follows from the fragment's number, whoever acts it.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from shared import exploration_config
from shared.policies.policy import Policy
from shared.spaces import Leaf
from shared.steps import Counters


class Exploration(Protocol):
    """Chooses actions for a batch of observations."""

    def act(
        self, policy: Policy, observations: Mapping[str, Tensor], generator: torch.Generator
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Action columns `[S, …]`, and the policy's outputs `[S, P]` where actions come from them."""
        ...

    def log_prob(self, policy: Policy, params: Tensor, actions: Mapping[str, Tensor]) -> Tensor:
        """`[B]`: of taking `actions` where the outputs are `params`; 0 where that is not known."""
        ...


def make_exploration(config: exploration_config.ExplorationConfig, counters: Counters) -> Exploration:
    """As an algorithm explores, at these counters of the trainer."""
    if isinstance(config, exploration_config.Sampling):
        return Sampling()
    if isinstance(config, exploration_config.EpsilonGreedy):
        return EpsilonGreedy(config.epsilon.value(counters))
    if isinstance(config, exploration_config.OrnsteinUhlenbeckNoise):
        return OrnsteinUhlenbeckNoise(config.sigma.value(counters), config.theta)
    if isinstance(config, exploration_config.ParameterNoise):
        return ParameterNoise(config.sigma.value(counters))
    return GaussianNoise(config.sigma.value(counters), config.bound)


class Sampling:
    """Draws from the policy's distribution: how on-policy algorithms act."""

    def act(
        self, policy: Policy, observations: Mapping[str, Tensor], generator: torch.Generator
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        params = policy.exploring_parameters(observations, generator)
        return policy.distribution.sample(params, generator), params

    def log_prob(self, policy: Policy, params: Tensor, actions: Mapping[str, Tensor]) -> Tensor:
        return policy.distribution.log_prob(params, actions)


class Greedy:
    """The best action: how evaluation acts."""

    def act(
        self, policy: Policy, observations: Mapping[str, Tensor], generator: torch.Generator
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        params = policy.action_parameters(observations)
        return policy.distribution.mode(params), params

    def log_prob(self, policy: Policy, params: Tensor, actions: Mapping[str, Tensor]) -> Tensor:
        return params.new_zeros(len(params))


class EpsilonGreedy:
    """A uniform joint choice with probability ε, else the best one."""

    def __init__(self, epsilon: float) -> None:
        self._epsilon = epsilon

    def act(
        self, policy: Policy, observations: Mapping[str, Tensor], generator: torch.Generator
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        params = policy.exploring_parameters(observations, generator)
        best = policy.distribution.mode(params)
        rows, device = len(params), params.device
        anyhow = torch.rand(rows, generator=generator, device=device) < self._epsilon
        actions = {}
        for leaf in policy.spaces.action.leaves:
            name = leaf.column("action")
            chosen = _uniform_choice(leaf, torch.rand((rows, *leaf.shape), generator=generator, device=device))
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


class _ActionNoise:
    """Noise on what the policy draws, clipped to the action's bounds; the density of what was clipped is not known."""

    def act(
        self, policy: Policy, observations: Mapping[str, Tensor], generator: torch.Generator
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        params = policy.action_parameters(observations)
        actions = policy.distribution.sample(params, generator)
        for leaf in policy.spaces.action.leaves:
            name = leaf.column("action")
            low, high = _bounds(leaf, params.device)
            fresh = torch.randn(actions[name].shape, generator=generator, device=params.device)
            noise = self._noise((id(policy), name), fresh) * ((high - low) / 2)
            actions[name] = (actions[name] + noise).clamp(low, high)
        return actions, params

    def _noise(self, whose: tuple[int, str], fresh: Tensor) -> Tensor:
        """Standard normal numbers → the noise of a policy's leaf in this step; 1 is half of the action's range."""
        raise NotImplementedError

    def log_prob(self, policy: Policy, params: Tensor, actions: Mapping[str, Tensor]) -> Tensor:
        return params.new_zeros(len(params))


class GaussianNoise(_ActionNoise):
    """Normal noise, each step's of its own."""

    def __init__(self, sigma: float, bound: float | None) -> None:
        self._sigma = sigma
        self._bound = math.inf if bound is None else bound

    def _noise(self, whose: tuple[int, str], fresh: Tensor) -> Tensor:
        return fresh.clamp(-self._bound, self._bound) * self._sigma


class OrnsteinUhlenbeckNoise(_ActionNoise):
    """x ← (1 − θ) x + σ · normal noise; the first x is drawn from what it becomes in time."""

    def __init__(self, sigma: float, theta: float) -> None:
        self._sigma = sigma
        self._kept = 1.0 - theta
        self._now: dict[tuple[int, str], Tensor] = {}

    def _noise(self, whose: tuple[int, str], fresh: Tensor) -> Tensor:
        if whose in self._now:
            now = self._kept * self._now[whose] + self._sigma * fresh
        else:  # a fragment may be short: noise that began at 0 would not have come far when it ends
            now = self._sigma / math.sqrt(1.0 - self._kept**2) * fresh
        self._now[whose] = now
        return now


class ParameterNoise:
    """The best action of a disturbed policy; how probable it was is not known."""

    def __init__(self, sigma: float) -> None:
        self._sigma = sigma
        self._disturbed: dict[int, Policy] = {}

    def act(
        self, policy: Policy, observations: Mapping[str, Tensor], generator: torch.Generator
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        if id(policy) not in self._disturbed:
            self._disturbed[id(policy)] = self._disturb(policy, generator)
        disturbed = self._disturbed[id(policy)]
        params = disturbed.action_parameters(observations)
        return disturbed.distribution.mode(params), params

    def _disturb(self, policy: Policy, generator: torch.Generator) -> Policy:
        disturbed = copy.deepcopy(policy)
        for parameter in disturbed.parameters():
            noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
            parameter.data.add_(noise, alpha=self._sigma)
        return disturbed

    def log_prob(self, policy: Policy, params: Tensor, actions: Mapping[str, Tensor]) -> Tensor:
        return params.new_zeros(len(params))


class RandomActing:
    """Uniform actions (standard normal where a box has no bounds): how heat-up acts."""

    def act(
        self, policy: Policy, observations: Mapping[str, Tensor], generator: torch.Generator
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        example = next(iter(observations.values()))
        rows, device = len(example), example.device
        actions = {}
        for leaf in policy.spaces.action.leaves:
            shape = (rows, *leaf.shape)
            uniform = torch.rand(shape, generator=generator, device=device)
            if leaf.kind == "box":
                low, high = _bounds(leaf, device)
                bounded = torch.isfinite(high - low)  # neither infinite nor so far apart that it is as good as that
                noise = torch.randn(shape, generator=generator, device=device)
                actions[leaf.column("action")] = torch.where(bounded, low + uniform * (high - low), noise)
            else:
                actions[leaf.column("action")] = _uniform_choice(leaf, uniform)
        return actions, None

    def log_prob(self, policy: Policy, params: Tensor, actions: Mapping[str, Tensor]) -> Tensor:
        return params.new_zeros(len(params))


@functools.lru_cache(maxsize=64)
def _bounds(leaf: Leaf, device: torch.device) -> tuple[Tensor, Tensor]:
    """A box's, float32; made once, since every step of a worker asks for them."""
    low, high = (torch.from_numpy(side).to(device) for side in leaf.bounds())
    return low, high


def _uniform_choice(leaf: Leaf, uniform: Tensor) -> Tensor:
    """Numbers in [0, 1) `[B, …]` → choices."""
    choices = torch.tensor(leaf.nvec, device=uniform.device).reshape(leaf.shape)
    return (uniform * choices).to(torch.int64).clamp_max(choices - 1)
