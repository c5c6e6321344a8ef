"""Choice of actions from a policy's outputs: drawn, greedy, or random (warm-up). Others: discrete.py, noise.py.

An exploration is created for each fragment, from the counters of the policy version: all its randomness follows from
the fragment's number and its episodes' seeds, whichever worker acts it.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from stagecoach.shared.experience.spaces import Array, Columns, Leaf, PolicySpaces, SpaceSpec
from stagecoach.shared.policies.actor_critic import Stateful
from stagecoach.shared.policies.masks import legal_choices
from stagecoach.shared.policies.policy import Policy

Tensors: TypeAlias = Mapping[str, Tensor]
"""Column → tensor."""
Acted: TypeAlias = tuple[dict[str, Tensor], Tensor]
"""Action columns `[S, …]`, and the parameters `[S, P]` that `log_prob` needs."""


class Exploration:
    """Chooses actions for a batch of observations; base class of all explorations."""

    by_slot = False
    """True if it distinguishes slots, and so needs all of them in each step."""
    knows_episodes = False
    """True if it depends on the episode of each environment, and so needs `begin`."""

    def begin(self, environment: int, seed: int) -> None:
        """Starts or continues the episode of this seed in `environment`; called at a fragment's beginning too."""

    def carried(self) -> Tensor | None:
        """Returns the state `[S, D]` of running episodes for the next fragment; None without state."""
        return None

    def take_up(self, policy: Policy, carried: Tensor) -> None:
        """Restores the state `carried` out of the last fragment; called after `begin`."""

    def act(self, policy: Policy, observations: Tensors, generator: torch.Generator) -> Acted:
        """Chooses actions for observations `[S, …]`."""
        raise NotImplementedError

    def log_prob(self, policy: Policy, params: Tensor, actions: Tensors) -> Tensor:
        """Returns `[B]` log-probabilities of `actions` given the `params` from `act`; NaN if unknown."""
        return params.new_full((len(params),), math.nan)


def act_for(
    exploration: Exploration, policy: Policy, observations: Columns, rows: Array, generator: torch.Generator
) -> tuple[Columns, Tensor]:
    """Chooses actions for the slots `rows` `[R]` of observations `[S, …]`; returns actions and parameters `[R, …]`. The
    state of other slots does not change."""
    device, among = generator.device, torch.from_numpy(rows)
    if exploration.by_slot:
        tensors = {name: torch.from_numpy(array).to(device) for name, array in observations.items()}
        before = policy.state if isinstance(policy, Stateful) else None
        chosen, params = exploration.act(policy, tensors, generator)
        if isinstance(policy, Stateful) and before is not None:
            policy.state = before.index_copy(0, among.to(device), policy.state[among])
        return {name: tensor[among].cpu().numpy() for name, tensor in chosen.items()}, params[among]
    tensors = {name: torch.from_numpy(array[rows]).to(device) for name, array in observations.items()}
    if isinstance(policy, Stateful):
        part = policy.of(among)
        chosen, params = exploration.act(part, tensors, generator)
        policy.state = policy.state.index_copy(0, among.to(device), part.state)
    else:
        chosen, params = exploration.act(policy, tensors, generator)
    return {name: tensor.cpu().numpy() for name, tensor in chosen.items()}, params


def no_actions(action: SpaceSpec, slots: int) -> Columns:
    """Returns zeros `[S, …]` for all columns of an action."""
    dtypes = {leaf: np.float32 if leaf.kind == "box" else leaf.column_dtype for leaf in action.leaves}
    return {leaf.column("action"): np.zeros((slots, *leaf.shape), dtype) for leaf, dtype in dtypes.items()}


class Sampling(Exploration):
    """Draws from the policy's distribution: how on-policy algorithms act."""

    def act(self, policy: Policy, observations: Tensors, generator: torch.Generator) -> Acted:
        params = policy.exploring_parameters(observations, generator)
        return policy.distribution.sample(params, generator), params

    def log_prob(self, policy: Policy, params: Tensor, actions: Tensors) -> Tensor:
        if policy.network.get("noisy"):  # the randomness is in the weights: the action has no probability of its own
            return super().log_prob(policy, params, actions)
        return policy.distribution.log_prob(params, actions)


class Greedy(Exploration):
    """The best action: how evaluation acts."""

    def act(self, policy: Policy, observations: Tensors, generator: torch.Generator) -> Acted:
        params = policy.action_parameters(observations)
        return policy.distribution.mode(params), params


class RandomActing(Exploration):
    """Uniform actions (standard normal where a box has no bounds): how warm-up acts."""

    def act(self, policy: Policy, observations: Tensors, generator: torch.Generator) -> Acted:
        example = next(iter(observations.values()))
        rows, device = len(example), example.device
        choices, actions = legal_by_leaf(observations, policy.spaces), {}
        for leaf in policy.spaces.action.leaves:
            shape = (rows, *leaf.shape)
            uniform = torch.rand(shape, generator=generator, device=device)
            if leaf.kind == "box":
                low, high = bounds_of(leaf, device)
                bounded = torch.isfinite(high - low)  # finite, and not too wide for float32
                noise = torch.randn(shape, generator=generator, device=device)
                actions[leaf.column("action")] = torch.where(bounded, low + uniform * (high - low), noise)
            else:
                legal = None if choices is None else next(choices)
                actions[leaf.column("action")] = uniform_choice(leaf, uniform, legal)
        return actions, uniform_log_prob(observations, policy.spaces)

    def log_prob(self, policy: Policy, params: Tensor, actions: Tensors) -> Tensor:
        """Returns log-probabilities; for boxes the log-density in the environment's units, as a policy does."""
        total = params[:, 0].clone()
        for leaf in policy.spaces.action.leaves:
            if leaf.kind != "box":
                continue
            low, high = bounds_of(leaf, params.device)
            width = high - low
            normal = -0.5 * actions[leaf.column("action")].square() - 0.5 * math.log(2 * math.pi)
            density = torch.where(torch.isfinite(width), -width.log(), normal)
            density = density.masked_fill(width == 0, math.nan)  # a single value has no density
            total += density.reshape(len(params), -1).sum(dim=1)
        return total


@functools.lru_cache(maxsize=64)
def bounds_of(leaf: Leaf, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns a box's bounds, float32; cached, since every step needs them."""
    low, high = (torch.from_numpy(side).to(device) for side in leaf.bounds())
    return low, high


def legal_by_leaf(observations: Tensors, spaces: PolicySpaces) -> Iterator[Tensor] | None:
    """Returns legal choices `[S, sum of nvec]` per leaf of choices; None without masks."""
    if (legal := legal_choices(observations, spaces)) is None:
        return None
    return iter(torch.split(legal, [sum(leaf.nvec) for leaf in spaces.action.leaves if leaf.nvec], 1))


def uniform_log_prob(observations: Tensors, spaces: PolicySpaces) -> Tensor:
    """Returns `[S, 1]` log-probabilities of a uniform (legal) joint choice."""
    example, by_leaf = next(iter(observations.values())), legal_by_leaf(observations, spaces)
    total = torch.zeros(len(example), 1, device=example.device)
    for leaf in spaces.action.leaves:
        if leaf.kind != "box":
            if by_leaf is None:
                total -= sum(math.log(choices) for choices in leaf.nvec)
            else:
                counts = [part.sum(dim=1, keepdim=True) for part in torch.split(next(by_leaf), list(leaf.nvec), dim=1)]
                total -= sum(count.clamp_min(1).log() for count in counts)
    return total


def uniform_choice(leaf: Leaf, uniform: Tensor, legal: Tensor | None = None) -> Tensor:
    """Maps numbers in [0, 1) `[B, …]` to choices, only to `legal` choices `[B, sum of nvec]` if given."""
    if legal is None:
        choices = torch.tensor(leaf.nvec, device=uniform.device).reshape(leaf.shape)
        return (uniform * choices).to(torch.int64).clamp_max(choices - 1)
    picked = []
    for share, part in zip(
        uniform.reshape(len(uniform), -1).unbind(1), torch.split(legal, list(leaf.nvec), dim=1), strict=True
    ):
        count = part.sum(dim=1)
        which = (share * count).to(torch.int64).minimum(count - 1)
        picked.append((part.cumsum(dim=1) > which.unsqueeze(1)).to(torch.int8).argmax(dim=1))
    return torch.stack(picked, dim=1).reshape(uniform.shape)
