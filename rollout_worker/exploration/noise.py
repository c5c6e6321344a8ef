"""Explorations by noise: on continuous actions, or on the weights of the policy."""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from stagecoach.rollout_worker.exploration.base import Acted, Exploration, RandomActing, Tensors, bounds_of
from stagecoach.shared.experience.spaces import Leaf
from stagecoach.shared.policies.continuous import Certain
from stagecoach.shared.policies.policy import Policy, copy_sharing_buffers

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
_WHICH_WEIGHTS = 2
"""Distinguishes this use of an episode's seed from the environment's."""


@dataclass
class _ActionNoise(Exploration):
    """Adds noise to the policy's actions and clips them to their bounds; the density of clipped actions is unknown."""

    sigma: float

    def act(self, policy: Policy, observations: Tensors, generator: torch.Generator) -> Acted:
        params = policy.action_parameters(observations)
        actions = policy.distribution.sample(params, generator)
        for leaf in policy.spaces.action.leaves:
            name = leaf.column("action")
            low, high = bounds_of(leaf, params.device)
            fresh = torch.randn(actions[name].shape, generator=generator, device=params.device)
            noise = self._noise(name, fresh) * ((high - low) / 2)
            actions[name] = (actions[name] + noise).clamp(low, high)
        return actions, params

    def _noise(self, name: str, fresh: Tensor) -> Tensor:
        """Maps standard normal numbers to the noise of a leaf in this step, in halves of the action's range."""
        raise NotImplementedError


@dataclass
class GaussianNoise(_ActionNoise):
    """Adds independent normal noise in each step."""

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

    def _noise(self, name: str, fresh: Tensor) -> Tensor:
        return (fresh if self.bound is None else fresh.clamp(-self.bound, self.bound)) * self.sigma


@dataclass
class OrnsteinUhlenbeckNoise(_ActionNoise):
    """Adds σ · x with x ← (1 − θ) x + normal noise; an episode's first x is from the stationary distribution."""

    by_slot = knows_episodes = True
    theta: float
    _now: dict[str, Tensor] = field(default_factory=dict)
    """Action column → x `[S, …]`."""
    _begun: set[int] = field(default_factory=set)
    _environments: int = 0

    def begin(self, environment: int, seed: int) -> None:
        self._begun.add(environment)
        self._environments = max(self._environments, environment + 1)

    def carried(self) -> Tensor | None:
        parts = [now.reshape(len(now), -1) for now in self._now.values()]
        return torch.cat(parts, dim=1) if parts else None

    def take_up(self, policy: Policy, carried: Tensor) -> None:
        leaves = policy.spaces.action.leaves
        parts = torch.split(carried, [leaf.size for leaf in leaves], dim=1)
        self._now = {leaf.column("action"): part.reshape(-1, *leaf.shape) for leaf, part in zip(leaves, parts)}
        self._begun.clear()

    def act(self, policy: Policy, observations: Tensors, generator: torch.Generator) -> Acted:
        acted = super().act(policy, observations, generator)
        self._begun.clear()
        return acted

    def _noise(self, name: str, fresh: Tensor) -> Tensor:
        kept = 1.0 - self.theta
        first = fresh / math.sqrt(1.0 - kept**2)  # episodes may be short: noise that starts at 0 would stay small
        now = kept * self._now[name] + fresh if name in self._now else first
        if self._begun and name in self._now:
            begun = [slot % self._environments in self._begun for slot in range(len(fresh))]
            now[torch.tensor(begun, device=now.device)] = first[begun]
        self._now[name] = now
        return self.sigma * now


@dataclass
class TruncatedGaussianNoise(Exploration):
    """Draws from the normal distribution around the policy's action, truncated at the action's bounds. The density is
    known only if the policy itself is deterministic (TD3, DDPG)."""

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
        """Returns mean and deviation of the normal distribution, float64, and its mass below each bound."""
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
    """Takes the best action of a policy with disturbed weights, by the episode's seed; probabilities are unknown."""

    by_slot = knows_episodes = True
    sigma: float
    _seeds: dict[int, int] = field(default_factory=dict)
    _disturbed: dict[int, Policy] = field(default_factory=dict)

    def begin(self, environment: int, seed: int) -> None:
        if self._seeds.get(environment) != seed:
            self._seeds[environment] = seed
            self._disturbed.pop(environment, None)

    def act(self, policy: Policy, observations: Tensors, generator: torch.Generator) -> Acted:
        count, parts = max(len(self._seeds), 1), {}
        for environment in range(count):
            if environment not in self._disturbed:
                self._disturbed[environment] = self._disturb(policy, environment, generator.device)
            its = {name: tensor[environment::count] for name, tensor in observations.items()}
            parts[environment] = self._disturbed[environment].action_parameters(its)
        params = parts[0].new_empty(len(next(iter(observations.values()))), parts[0].shape[1])
        for environment, its_params in parts.items():
            params[environment::count] = its_params
        return policy.distribution.mode(params), params

    def _disturb(self, policy: Policy, environment: int, device: torch.device) -> Policy:
        seed = np.random.SeedSequence([self._seeds.get(environment, 0), _WHICH_WEIGHTS]).generate_state(1)[0]
        generator, disturbed = torch.Generator(device).manual_seed(int(seed)), copy_sharing_buffers(policy)
        for parameter in disturbed.parameters():
            noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
            parameter.data.add_(noise, alpha=self.sigma)
        return disturbed
