"""Action distributions as pure functions of a flat parameter tensor.

A policy's head gives `[B, P]` parameters for all action leaves together. Workers keep the parameters while they act
and compute the log-probabilities of a whole fragment at once; the trainer evaluates the same functions.
Joint log-probability and entropy are sums over the leaves (they are independent given the observation).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import nll_loss

from shared.errors import UnsupportedSpace
from shared.spaces import Leaf, SpaceSpec

_LOG_STD_BOUNDS = (-20.0, 2.0)
_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class LeafDistribution(Protocol):
    """The distribution of one action leaf."""

    @property
    def parameters(self) -> int:
        """Width of its slice of the parameter tensor."""
        ...

    def sample(self, params: Tensor, generator: torch.Generator) -> Tensor:
        """`[B, P]` → a random action `[B, …leaf shape]`."""
        ...

    def mode(self, params: Tensor) -> Tensor:
        """`[B, P]` → the most probable action."""
        ...

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        """`[B]`, natural logarithm."""
        ...

    def entropy(self, params: Tensor) -> Tensor:
        """`[B]`, nats."""
        ...

    def log_prob_and_entropy(self, params: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Both, with what they have in common worked out once."""
        ...

    def divergence(self, params: Tensor, other: Tensor) -> Tensor:
        """`[B]`, nats: the Kullback-Leibler divergence of the one of `params` from that of `other`."""
        ...


class Categorical:
    """Independent choices: one (Discrete), or one per element (MultiDiscrete, MultiBinary)."""

    def __init__(self, leaf: Leaf) -> None:
        self._shape = leaf.shape
        self._sizes = list(leaf.nvec)

    @property
    def parameters(self) -> int:
        """One logit per choice."""
        return sum(self._sizes)

    def sample(self, params: Tensor, generator: torch.Generator) -> Tensor:
        """By the Gumbel-max trick: argmax(logits + Gumbel noise)."""
        noise = torch.empty_like(params).exponential_(generator=generator).log_()
        return self.mode(params - noise)

    def mode(self, params: Tensor) -> Tensor:
        """The largest logit of each choice."""
        picked = [part.argmax(dim=-1) for part in _split(params, self._sizes)]
        return torch.stack(picked, dim=-1).reshape(params.shape[0], *self._shape)

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        """Sum over the choices of log softmax at the action."""
        return self._chosen(self._log_p(params), action)

    def entropy(self, params: Tensor) -> Tensor:
        """Sum over the choices of −Σ p log p."""
        return _added([_entropy(log_p) for log_p in self._log_p(params)])

    def log_prob_and_entropy(self, params: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Both from one log softmax."""
        each = self._log_p(params)
        return self._chosen(each, action), _added([_entropy(log_p) for log_p in each])

    def divergence(self, params: Tensor, other: Tensor) -> Tensor:
        """Sum over the choices of Σ p (log p − log q)."""
        pairs = zip(self._log_p(params), self._log_p(other), strict=True)
        return _added([(log_p.exp() * (log_p - log_q)).sum(dim=-1) for log_p, log_q in pairs])

    def _log_p(self, params: Tensor) -> list[Tensor]:
        """`[B, n]` of each choice."""
        return [torch.log_softmax(part, dim=-1) for part in _split(params, self._sizes)]

    def _chosen(self, each: list[Tensor], action: Tensor) -> Tensor:
        """`[B]`. PyTorch's negative likelihood picks as `gather` does, and is several times as fast backwards."""
        action = action.reshape(-1, len(self._sizes))
        unlikely = [nll_loss(log_p, action[:, index], reduction="none") for index, log_p in enumerate(each)]
        return -_added(unlikely)


class DiagonalGaussian:
    """A box of independent normals. Samples are not bounded; the environment adapter clips them to the box."""

    def __init__(self, leaf: Leaf) -> None:
        self._shape = leaf.shape
        self._size = leaf.size

    @property
    def parameters(self) -> int:
        """Mean and log standard deviation of each element."""
        return 2 * self._size

    def _split(self, params: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = _split(params, [self._size, self._size])
        return mean, log_std.clamp(*_LOG_STD_BOUNDS)

    def sample(self, params: Tensor, generator: torch.Generator) -> Tensor:
        """mean + σ · standard normal noise."""
        mean, log_std = self._split(params)
        noise = torch.empty_like(mean).normal_(generator=generator)
        return (mean + log_std.exp() * noise).reshape(-1, *self._shape)

    def mode(self, params: Tensor) -> Tensor:
        """The mean."""
        return self._split(params)[0].reshape(-1, *self._shape)

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        """Sum over the elements of the normal log-density."""
        mean, log_std = self._split(params)
        z = (action.reshape(params.shape[0], self._size) - mean) * (-log_std).exp()
        return (-0.5 * z.square() - log_std - _HALF_LOG_2PI).sum(dim=-1)

    def entropy(self, params: Tensor) -> Tensor:
        """Sum over the elements of ½ + ½ log 2π + log σ."""
        _, log_std = self._split(params)
        return (0.5 + _HALF_LOG_2PI + log_std).sum(dim=-1)

    def log_prob_and_entropy(self, params: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """They have nothing in common that takes long."""
        return self.log_prob(params, action), self.entropy(params)

    def divergence(self, params: Tensor, other: Tensor) -> Tensor:
        """Sum over the elements of log σ_q − log σ_p + (σ_p² + (μ_p − μ_q)²) / 2 σ_q² − ½."""
        (mean, log_std), (other_mean, other_log_std) = self._split(params), self._split(other)
        spread = (2 * (log_std - other_log_std)).exp() + ((mean - other_mean) * (-other_log_std).exp()).square()
        return (other_log_std - log_std + 0.5 * spread - 0.5).sum(dim=-1)


class ActionDistribution:
    """The joint distribution over all leaves of an action space; actions are dicts of columns."""

    def __init__(self, action: SpaceSpec) -> None:
        self.names = action.column_names("action")
        self._leaves = [_leaf_distribution(leaf) for leaf in action.leaves]
        self._sizes = [leaf.parameters for leaf in self._leaves]

    @property
    def parameters(self) -> int:
        """Width of the parameter tensor."""
        return sum(self._sizes)

    def sample(self, params: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """A random joint action."""
        parts = zip(self.names, self._leaves, _split(params, self._sizes), strict=True)
        return {name: leaf.sample(part, generator) for name, leaf, part in parts}

    def mode(self, params: Tensor) -> dict[str, Tensor]:
        """The most probable joint action."""
        parts = zip(self.names, self._leaves, _split(params, self._sizes), strict=True)
        return {name: leaf.mode(part) for name, leaf, part in parts}

    def log_prob(self, params: Tensor, actions: Mapping[str, Tensor]) -> Tensor:
        """`[B]`."""
        parts = zip(self.names, self._leaves, _split(params, self._sizes), strict=True)
        return _added([leaf.log_prob(part, actions[name]) for name, leaf, part in parts])

    def entropy(self, params: Tensor) -> Tensor:
        """`[B]`."""
        parts = zip(self._leaves, _split(params, self._sizes), strict=True)
        return _added([leaf.entropy(part) for leaf, part in parts])

    def log_prob_and_entropy(self, params: Tensor, actions: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Both `[B]`, with what they have in common worked out once."""
        parts = zip(self.names, self._leaves, _split(params, self._sizes), strict=True)
        both = [leaf.log_prob_and_entropy(part, actions[name]) for name, leaf, part in parts]
        return _added([log_prob for log_prob, _ in both]), _added([entropy for _, entropy in both])

    def divergence(self, params: Tensor, other: Tensor) -> Tensor:
        """`[B]`, nats: the Kullback-Leibler divergence of the one of `params` from that of `other`."""
        parts = zip(self._leaves, _split(params, self._sizes), _split(other, self._sizes), strict=True)
        return _added([leaf.divergence(part, of_other) for leaf, part, of_other in parts])


def _split(params: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    return (params,) if len(sizes) == 1 else torch.split_with_sizes(params, sizes, dim=-1)


def _added(parts: Sequence[Tensor]) -> Tensor:
    """From the first to the last."""
    return functools.reduce(torch.add, parts)


def _entropy(log_p: Tensor) -> Tensor:
    return -(log_p.exp() * log_p).sum(dim=-1)


def _leaf_distribution(leaf: Leaf) -> LeafDistribution:
    if leaf.kind != "box":
        return Categorical(leaf)
    if leaf.dtype not in {"float32", "float64"}:
        raise UnsupportedSpace(f"action {leaf.path or 'space'}: a Box of {leaf.dtype} cannot be sampled; use floats")
    return DiagonalGaussian(leaf)
