"""Policies of the actor alone, whose critics stay with the trainer: `actor` for SAC, `deterministic` for TD3 and DDPG.

Actions of boxes are squashed by tanh and rescaled to the box's bounds: the environment gets its own units.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from stagecoach.shared.base.errors import UnsupportedSpace
from stagecoach.shared.config.sections import PolicyConfig
from stagecoach.shared.experience.spaces import PolicySpaces, SpaceSpec
from stagecoach.shared.policies.distributions import HALF_LOG_2PI, LOG_STD_BOUNDS, ActionDistribution
from stagecoach.shared.policies.encoders import linear, unrounded
from stagecoach.shared.policies.masks import masked
from stagecoach.shared.policies.policy import Distribution, Policy

_INSIDE = 1.0 - 1e-6
"""The largest |tanh| that is inverted: float32 knows few numbers between it and 1."""


class SquashedGaussian:
    """tanh of normals, rescaled (Haarnoja et al. 2018b, appendix C); `params` are means, then log σ, `[B, 2D]`."""

    draws = True

    def __init__(self, bounds: BoundedActions) -> None:
        self._bounds = bounds
        self.parameters = 2 * bounds.size

    def sample(self, params: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        mean, log_std = self._split(params)
        noise = torch.empty_like(mean).normal_(generator=generator)
        return self._bounds.columns(torch.tanh(torch.addcmul(mean, log_std.exp(), noise)))

    def mode(self, params: Tensor) -> dict[str, Tensor]:
        """tanh(mean), rescaled: the median, as is usual in evaluation."""
        return self._bounds.columns(torch.tanh(self._split(params)[0]))

    def log_prob(self, params: Tensor, actions: Mapping[str, Tensor]) -> Tensor:
        """`[B]`: the log density in the environment's units."""
        mean, log_std = self._split(params)
        before = torch.atanh(self._bounds.flat(actions).clamp(-_INSIDE, _INSIDE))
        noise = (before - mean) * (-log_std).exp()
        return _log_density(before, noise, log_std) - self._bounds.log_volume

    def reparameterized(self, params: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """`noise` `[B, D]`, standard normal → actions in [-1, 1] `[B, D]` and their log density there `[B]`."""
        mean, log_std = self._split(params)
        before = torch.addcmul(mean, log_std.exp(), noise)
        return torch.tanh(before), _log_density(before, noise, log_std)

    def _split(self, params: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = params.chunk(2, dim=-1)
        return mean, log_std.clamp(*LOG_STD_BOUNDS)


def _log_density(before: Tensor, noise: Tensor, log_std: Tensor) -> Tensor:
    """Log density of tanh(before), where before = mean + σ noise; ln(1 − tanh² x) as 2 (ln 2 − x − softplus(−2x))."""
    slope = math.log(2.0) - before - nn.functional.softplus(-2.0 * before)
    return (-0.5 * noise.square() - log_std - HALF_LOG_2PI - 2.0 * slope).sum(dim=-1)


class Certain:
    """One action and no other; `params` are its elements before tanh, `[B, D]`."""

    draws = False

    def __init__(self, bounds: BoundedActions) -> None:
        self.bounds = bounds

    def sample(self, params: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        return self.mode(params)

    def mode(self, params: Tensor) -> dict[str, Tensor]:
        return self.bounds.columns(torch.tanh(params))

    def log_prob(self, params: Tensor, actions: Mapping[str, Tensor]) -> Tensor:
        """Returns NaN for unknown: a single action has no density."""
        return params.new_full((len(params),), math.nan)


class Actor(Policy):
    """Encoder and head: squashed Gaussians where all actions are boxes, else a distribution over choices."""

    kind = "actor"

    def __init__(self, spaces: PolicySpaces, config: PolicyConfig) -> None:
        super().__init__(spaces, config)
        self.actor = self.make_encoder(spaces.observation, config)
        if any(leaf.kind == "box" for leaf in spaces.action.leaves):
            self.bounds = BoundedActions(spaces.action)
            self.distribution: SquashedGaussian | ActionDistribution = SquashedGaussian(self.bounds)
        else:
            self.distribution = ActionDistribution(spaces.action)
        self.head = linear(self.actor.features, self.distribution.parameters, 0.01)
        if isinstance(self.distribution, SquashedGaussian):
            with torch.no_grad():
                self.head.bias[self.bounds.size :] = config.log_std_init

    def action_parameters(self, observations: Mapping[str, Tensor]) -> Tensor:
        """`[B, P]` for `self.distribution`."""
        params: Tensor = self.head(self.actor(observations, self.normalizer))
        return masked(unrounded(params), observations, self.spaces)


class Deterministic(Policy):
    """Encoder and head of one action for each observation."""

    kind = "deterministic"

    def __init__(self, spaces: PolicySpaces, config: PolicyConfig) -> None:
        super().__init__(spaces, config)
        self.bounds = BoundedActions(spaces.action)
        self.distribution: Distribution = Certain(self.bounds)
        self.actor = self.make_encoder(spaces.observation, config)
        self.head = linear(self.actor.features, self.bounds.size, 0.01)

    def action_parameters(self, observations: Mapping[str, Tensor]) -> Tensor:
        """`[B, D]`: the action in [-1, 1], before tanh."""
        params: Tensor = self.head(self.actor(observations, self.normalizer))
        return unrounded(params)


class BoundedActions(nn.Module):
    """Actions of bounded boxes, flat and in [-1, 1] (all leaves side by side) or as columns in the environment's units;
    raises `UnsupportedSpace` for other leaves. The bounds do not travel with the weights."""

    def __init__(self, action: SpaceSpec) -> None:
        super().__init__()
        lows, highs = [], []
        for leaf in action.leaves:
            where, need = leaf.path or "space", "continuous actions need Boxes of floats with finite bounds"
            if leaf.kind != "box" or leaf.dtype not in {"float32", "float64"}:
                raise UnsupportedSpace(f"action {where}: {leaf.kind} of {leaf.dtype}; {need}")
            low, high = leaf.bounds()
            if not (np.isfinite(high - low).all() and (low < high).all()):
                raise UnsupportedSpace(
                    f"action {where}: bounds {list(leaf.low)} to {list(leaf.high)}; {need}. Let the environment or a "
                    f"wrapper set them, or use algorithm: ppo"
                )
            lows.append(torch.from_numpy(low).reshape(-1))
            highs.append(torch.from_numpy(high).reshape(-1))
        lower, upper = torch.cat(lows), torch.cat(highs)
        self.names = action.column_names("action")
        self._shapes = [leaf.shape for leaf in action.leaves]
        self._sizes = [leaf.size for leaf in action.leaves]
        self.size = sum(self._sizes)
        self.register_buffer("middle", (lower + upper) / 2, persistent=False)
        self.register_buffer("scale", (upper - lower) / 2, persistent=False)
        self.log_volume = float(torch.log(((upper - lower) / 2).to(torch.float64)).sum())
        """Difference of a log density in [-1, 1] and one in the environment's units."""

    def columns(self, flat: Tensor) -> dict[str, Tensor]:
        """`[B, D]` in [-1, 1] → action columns."""
        middle, scale = cast(Tensor, self.middle), cast(Tensor, self.scale)
        parts = torch.split_with_sizes(torch.addcmul(middle, flat, scale), self._sizes, dim=-1)
        named = zip(self.names, parts, self._shapes, strict=True)
        return {name: part.reshape(-1, *shape) for name, part, shape in named}

    def flat(self, actions: Mapping[str, Tensor]) -> Tensor:
        """The inverse of `columns`, float32. What was recorded beyond a bound is what the environment did of it."""
        parts = [actions[name].reshape(-1, size) for name, size in zip(self.names, self._sizes, strict=True)]
        joined = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).to(torch.float32)
        return ((joined - cast(Tensor, self.middle)) / cast(Tensor, self.scale)).clamp(-1.0, 1.0)
