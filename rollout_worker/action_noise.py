"""Ways to explore by noise: on continuous actions, or on the weights of the policy."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from rollout_worker.exploration import Exploration, bounds_of
from shared.policies.actor import Certain
from shared.policies.policy import Policy, copy_sharing_buffers
from shared.spaces import Leaf

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class _ActionNoise(Exploration):
    """Noise on what the policy draws, clipped to the action's bounds; the density of what was clipped is not known."""

    def act(
        self, policy: Policy, observations: Mapping[str, Tensor], generator: torch.Generator
    ) -> tuple[dict[str, Tensor], Tensor]:
        params = policy.action_parameters(observations)
        actions = policy.distribution.sample(params, generator)
        for leaf in policy.spaces.action.leaves:
            name = leaf.column("action")
            low, high = bounds_of(leaf, params.device)
            fresh = torch.randn(actions[name].shape, generator=generator, device=params.device)
            noise = self._noise((id(policy), name), fresh) * ((high - low) / 2)
            actions[name] = (actions[name] + noise).clamp(low, high)
        return actions, params

    def _noise(self, whose: tuple[int, str], fresh: Tensor) -> Tensor:
        """Standard normal numbers → the noise of a policy's leaf in this step; 1 is half of the action's range."""
        raise NotImplementedError


class GaussianNoise(_ActionNoise):
    """Normal noise, each step's of its own."""

    def __init__(self, sigma: float, bound: float | None) -> None:
        self._sigma = sigma
        self._bound = math.inf if bound is None else bound

    def _noise(self, whose: tuple[int, str], fresh: Tensor) -> Tensor:
        return fresh.clamp(-self._bound, self._bound) * self._sigma


class TruncatedGaussianNoise(Exploration):
    """Draws from the normal distribution around what the policy draws, cut off at the action's bounds.

    Where the policy itself draws nothing (TD3, DDPG), the density of what is drawn is known; else it is not.
    """

    def __init__(self, sigma: float) -> None:
        self._sigma = sigma

    def act(
        self, policy: Policy, observations: Mapping[str, Tensor], generator: torch.Generator
    ) -> tuple[dict[str, Tensor], Tensor]:
        params = policy.action_parameters(observations)
        actions = policy.distribution.sample(params, generator)
        for leaf in policy.spaces.action.leaves if self._sigma else ():
            name = leaf.column("action")
            middle, deviation, below, above = self._cut(leaf, actions[name])
            share = torch.rand(middle.shape, generator=generator, device=middle.device, dtype=middle.dtype)
            drawn = middle + deviation * torch.special.ndtri(below + share * (above - below))
            actions[name] = drawn.to(actions[name].dtype).clamp(*bounds_of(leaf, drawn.device))
        return actions, params

    def _cut(self, leaf: Leaf, middle: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Middle and deviation, and the shares of the whole normal distribution below each bound; float64."""
        low, high = (side.to(torch.float64) for side in bounds_of(leaf, middle.device))
        middle, deviation = middle.to(torch.float64).clamp(low, high), self._sigma * (high - low) / 2
        below, above = (torch.special.ndtr((side - middle) / deviation) for side in (low, high))
        return middle, deviation, below, above

    def log_prob(self, policy: Policy, params: Tensor, actions: Mapping[str, Tensor]) -> Tensor:
        if not (self._sigma and isinstance(policy.distribution, Certain)):
            return super().log_prob(policy, params, actions)
        best, total = policy.distribution.mode(params), params.new_zeros(len(params), dtype=torch.float64)
        for leaf in policy.spaces.action.leaves:
            name = leaf.column("action")
            middle, deviation, below, above = self._cut(leaf, best[name])
            far = (actions[name] - middle) / deviation
            density = -0.5 * far.square() - _HALF_LOG_2PI - (deviation * (above - below)).log()
            total += density.reshape(len(params), -1).sum(dim=1)
        return total.to(params.dtype)


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


class ParameterNoise(Exploration):
    """The best action of a disturbed policy; how probable it was is not known."""

    def __init__(self, sigma: float) -> None:
        self._sigma = sigma
        self._disturbed: dict[int, Policy] = {}

    def act(
        self, policy: Policy, observations: Mapping[str, Tensor], generator: torch.Generator
    ) -> tuple[dict[str, Tensor], Tensor]:
        if id(policy) not in self._disturbed:
            self._disturbed[id(policy)] = self._disturb(policy, generator)
        disturbed = self._disturbed[id(policy)]
        params = disturbed.action_parameters(observations)
        return disturbed.distribution.mode(params), params

    def _disturb(self, policy: Policy, generator: torch.Generator) -> Policy:
        disturbed = copy_sharing_buffers(policy)
        for parameter in disturbed.parameters():
            noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
            parameter.data.add_(noise, alpha=self._sigma)
        return disturbed
