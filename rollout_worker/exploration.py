"""How a policy's outputs become actions: sampled, greedy, or random (heat-up)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from shared.policies.actor_critic import ActorCritic


class Exploration(Protocol):
    """Chooses actions for a batch of observations."""

    def act(
        self, policy: ActorCritic, observations: Mapping[str, Tensor], generator: torch.Generator
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Action columns `[S, …]`, and the distribution's parameters `[S, P]` where actions come from it."""
        ...


class Sampling:
    """Draws from the policy's distribution: how on-policy algorithms act."""

    def act(
        self, policy: ActorCritic, observations: Mapping[str, Tensor], generator: torch.Generator
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        params = policy.action_parameters(observations)
        return policy.distribution.sample(params, generator), params


class Greedy:
    """The most probable action: how evaluation acts."""

    def act(
        self, policy: ActorCritic, observations: Mapping[str, Tensor], generator: torch.Generator
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        params = policy.action_parameters(observations)
        return policy.distribution.mode(params), params


class RandomActing:
    """Uniform actions (standard normal where a box has no bounds): how heat-up acts."""

    def act(
        self, policy: ActorCritic, observations: Mapping[str, Tensor], generator: torch.Generator
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        example = next(iter(observations.values()))
        rows, device = len(example), example.device
        actions = {}
        for leaf in policy.spaces.action.leaves:
            shape = (rows, *leaf.shape)
            uniform = torch.rand(shape, generator=generator, device=device)
            if leaf.kind == "box":
                low, high = (torch.from_numpy(np.array(side)).reshape(leaf.shape).to(device) for side in leaf.bounds())
                bounded = torch.isfinite(
                    high - low
                )  # neither side infinite, nor so far apart that it is as good as that
                noise = torch.randn(shape, generator=generator, device=device)
                actions[leaf.column("action")] = torch.where(bounded, low + uniform * (high - low), noise)
            else:
                choices = torch.tensor(leaf.nvec, device=device).reshape(leaf.shape)
                actions[leaf.column("action")] = (uniform * choices).to(torch.int64).clamp_max(choices - 1)
        return actions, None
