"""Fitted Q evaluation: the return that a policy would have, learnt from experience that another one acted.

Le, Voloshin and Yue 2019 ("Batch policy learning under constraints", algorithm 3), by a small network. It begins as a
regression on the returns that were seen, which is near the answer where the policies are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shared.config import PolicyConfig
from shared.policies.encoders import Encoder, ObservationNormaliser
from shared.policies.policy import Policy
from shared.policies.registry import borrowed_random_state
from shared.spaces import PolicySpaces
from trainer_node.algorithms.adam import Adam

_LEARNING_RATE = 1e-3
_MINIBATCH = 256
_STEPS_PER_ROUND = 50
_SAMPLES = 16
_CHUNK = 8192

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Transitions:
    """M of them: `obs…` and `action…` columns `[M, …]`, the rest `[M]`."""

    observations: Tensors
    actions: Tensors
    reward: Tensor
    terminated: Tensor
    after: Tensors
    """What was observed after each step, as `obs…`."""
    returns: Tensor
    """The discounted sum of the rewards seen from each step on."""

    def __len__(self) -> int:
        return len(self.reward)


class FittedQ(nn.Module):
    """q(s, a) and, for a policy, v(s)."""

    def __init__(self, spaces: PolicySpaces, observations: Tensors, scale: float) -> None:
        """`observations` give the inputs their scale, `scale` is that of the returns."""
        super().__init__()
        plain = PolicyConfig(hidden_sizes=(), cnn="small")
        self._normaliser = ObservationNormaliser(spaces.observation, 10.0)
        self._normaliser.update(observations)
        self._observation, self._action = Encoder(spaces.observation, plain), Encoder(spaces.action, plain)
        width = self._observation.features + self._action.features
        self._mlp = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        self._scale = scale

    def forward(self, observations: Mapping[str, Tensor], actions: Mapping[str, Tensor]) -> Tensor:
        """`[B]`."""
        named = {"obs" + name.removeprefix("action"): tensor for name, tensor in actions.items()}
        parts = self._observation(observations, self._normaliser), self._action(named, None)
        value: Tensor = self._mlp(torch.cat(parts, dim=1)).squeeze(-1) * self._scale
        return value

    @torch.no_grad()
    def value(self, policy: Policy, observations: Tensors, generator: torch.Generator) -> Tensor:
        """`[B]`: the mean over the policy's actions; over all choices where there is one to make, else over samples."""
        parts = []
        for chunk in _chunks(observations):
            params = policy.action_parameters(chunk)
            (leaf, *others) = policy.spaces.action.leaves
            if leaf.kind == "discrete" and not others:
                name = leaf.column("action")
                choices = [{name: torch.full((len(params),), n, device=params.device)} for n in range(leaf.nvec[0])]
                weights = [policy.distribution.log_prob(params, choice).exp() for choice in choices]
            else:
                choices = [policy.distribution.sample(params, generator) for _ in range(_SAMPLES)]
                weights = [torch.full((len(params),), 1 / _SAMPLES, device=params.device)] * _SAMPLES
            values = [weight * self(chunk, choice) for weight, choice in zip(weights, choices, strict=True)]
            parts.append(torch.stack(values).sum(dim=0))
        return torch.cat(parts)


def fit(policy: Policy, data: Transitions, gamma: float, gradient_steps: int, seed: int) -> FittedQ:
    """The Q function of `policy` on `data`; everything random in it follows from `seed`."""
    device = data.reward.device
    horizon = min(1 / (1 - gamma) if gamma < 1 else float(len(data)), float(len(data)))
    scale = max(float(data.reward.abs().mean()) * horizon, 1e-6)
    with borrowed_random_state(seed):
        fitted = FittedQ(policy.spaces, data.observations, scale).to(device)
    optimiser = Adam(fitted.parameters(), 1e-8)
    generator, target = torch.Generator().manual_seed(seed), data.returns
    sampling = torch.Generator(device).manual_seed(seed)
    for step in range(gradient_steps):
        if step % _STEPS_PER_ROUND == 0 and step >= gradient_steps // 4:
            after = fitted.value(policy, data.after, sampling)
            target = data.reward + gamma * after * ~data.terminated
        rows = torch.randint(len(data), (min(_MINIBATCH, len(data)),), generator=generator).to(device)
        observations = {name: tensor[rows] for name, tensor in data.observations.items()}
        actions = {name: tensor[rows] for name, tensor in data.actions.items()}
        error = (fitted(observations, actions) - target[rows]) / scale
        optimiser.zero_grad()
        error.square().mean().backward()
        optimiser.step(_LEARNING_RATE * (1 - step / gradient_steps))
    return fitted


def _chunks(observations: Tensors) -> list[Tensors]:
    rows = len(next(iter(observations.values())))
    starts = range(0, rows, _CHUNK)
    return [{name: tensor[start : start + _CHUNK] for name, tensor in observations.items()} for start in starts]
