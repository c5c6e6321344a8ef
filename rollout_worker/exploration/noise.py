"""Ways to explore by noise: on continuous actions, or on the weights of the policy."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollout_worker.exploration.base import Acted, Exploration, RandomActing, Tensors, bounds_of
from shared.experience.spaces import Leaf
from shared.policies.continuous import Certain
from shared.policies.policy import Policy, copy_sharing_buffers

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


@dataclass
class _ActionNoise(Exploration):
    """Noise on what the policy draws, clipped to the action's bounds; the density of what was clipped is not known."""

    sigma: float

    def act(self, policy: Policy, observations: Tensors, generator: torch.Generator) -> Acted:
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


@dataclass
class GaussianNoise(_ActionNoise):
    """Normal noise, each step's of its own."""

    bound: float | None
    uniform: float = 0.0

    def act(self, policy: Policy, observations: Tensors, generator: torch.Generator) -> Acted:
        actions, params = super().act(policy, observations, generator)
        if self.uniform:
            drawn, _ = RandomActing().act(policy, observations, generator)
            which = torch.rand(len(params), generator=generator, device=params.device) < self.uniform
            for name, array in drawn.items():
                actions[name][which] = array[which]
        return actions, params

    def _noise(self, whose: tuple[int, str], fresh: Tensor) -> Tensor:
        return (fresh if self.bound is None else fresh.clamp(-self.bound, self.bound)) * self.sigma


@dataclass
class OrnsteinUhlenbeckNoise(_ActionNoise):
    """x ← (1 − θ) x + σ · normal noise; the first x is drawn from what it becomes in time."""

    by_slot = True
    theta: float
    _now: dict[tuple[int, str], Tensor] = field(default_factory=dict)

    def _noise(self, whose: tuple[int, str], fresh: Tensor) -> Tensor:
        kept = 1.0 - self.theta
        if whose in self._now:
            now = kept * self._now[whose] + self.sigma * fresh
        else:  # a fragment may be short: noise that began at 0 would not have come far when it ends
            now = self.sigma / math.sqrt(1.0 - kept**2) * fresh
        self._now[whose] = now
        return now


@dataclass
class TruncatedGaussianNoise(Exploration):
    """Draws from the normal distribution around what the policy draws, cut off at the action's bounds.

    Where the policy itself draws nothing (TD3, DDPG), the density of what is drawn is known; else it is not.
    """

    sigma: float

    def act(self, policy: Policy, observations: Tensors, generator: torch.Generator) -> Acted:
        params = policy.action_parameters(observations)
        actions = policy.distribution.sample(params, generator)
        for leaf in policy.spaces.action.leaves if self.sigma else ():
            name = leaf.column("action")
            middle, deviation, below, above = self._cut(leaf, actions[name])
            share = torch.rand(middle.shape, generator=generator, device=middle.device, dtype=middle.dtype)
            drawn = middle + deviation * torch.special.ndtri(below + share * (above - below))
            actions[name] = drawn.to(actions[name].dtype).clamp(*bounds_of(leaf, drawn.device))
        return actions, params

    def _cut(self, leaf: Leaf, middle: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Middle and deviation of the normal distribution, float64, and its shares below the lower and upper bound."""
        low, high = (side.to(torch.float64) for side in bounds_of(leaf, middle.device))
        middle, deviation = middle.to(torch.float64).clamp(low, high), self.sigma * (high - low) / 2
        below, above = (torch.special.ndtr((side - middle) / deviation) for side in (low, high))
        return middle, deviation, below, above

    def log_prob(self, policy: Policy, params: Tensor, actions: Tensors) -> Tensor:
        if not (self.sigma and isinstance(policy.distribution, Certain)):
            return super().log_prob(policy, params, actions)
        best, total = policy.distribution.mode(params), params.new_zeros(len(params), dtype=torch.float64)
        for leaf in policy.spaces.action.leaves:
            name = leaf.column("action")
            middle, deviation, below, above = self._cut(leaf, best[name])
            far = (actions[name] - middle) / deviation
            density = -0.5 * far.square() - _HALF_LOG_2PI - (deviation * (above - below)).log()
            total += density.reshape(len(params), -1).sum(dim=1)
        return total.to(params.dtype)


@dataclass
class ParameterNoise(Exploration):
    """The best action of a disturbed policy; how probable it was is not known."""

    sigma: float
    _disturbed: dict[int, Policy] = field(default_factory=dict)

    def act(self, policy: Policy, observations: Tensors, generator: torch.Generator) -> Acted:
        if id(policy) not in self._disturbed:
            disturbed = self._disturbed[id(policy)] = copy_sharing_buffers(policy)
            for parameter in disturbed.parameters():
                noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
                parameter.data.add_(noise, alpha=self.sigma)
        disturbed = self._disturbed[id(policy)]
        params = disturbed.action_parameters(observations)
        return disturbed.distribution.mode(params), params
