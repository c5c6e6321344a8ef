"""Action distributions: pure functions of a policy's parameters `[B, P]` for all leaves, which are independent."""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import nll_loss

from stagecoach.shared.base.errors import UnsupportedSpace
from stagecoach.shared.experience.spaces import Leaf, SpaceSpec

LOG_STD_BOUNDS = (-20.0, 2.0)
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class Categorical:
    """Independent choices: one (Discrete), or one per element (MultiDiscrete, MultiBinary)."""

    def __init__(self, leaf: Leaf) -> None:
        self._shape = leaf.shape
        self._sizes = list(leaf.nvec)
        self.parameters = sum(leaf.nvec)

    def sample(self, params: Tensor, generator: torch.Generator) -> Tensor:
        """Samples by the Gumbel-max trick: argmax(logits + Gumbel noise)."""
        noise = torch.empty_like(params).exponential_(generator=generator).log_()
        return self.mode(params - noise)

    def mode(self, params: Tensor) -> Tensor:
        picked = [part.argmax(dim=-1) for part in _split(params, self._sizes)]
        return torch.stack(picked, dim=-1).reshape(params.shape[0], *self._shape)

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        return self._chosen(self._log_p(params), action)

    def probabilities(self, params: Tensor) -> Tensor:
        """`[B, P]`: of each option of each choice, side by side."""
        return torch.cat(self._log_p(params), dim=-1).exp()

    def entropy(self, params: Tensor) -> Tensor:
        return _added([_entropy(log_p) for log_p in self._log_p(params)])

    def log_prob_and_entropy(self, params: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        each = self._log_p(params)
        return self._chosen(each, action), _added([_entropy(log_p) for log_p in each])

    def divergence(self, params: Tensor, other: Tensor) -> Tensor:
        """Sum over the choices of Σ p (log p − log q)."""
        pairs = zip(self._log_p(params), self._log_p(other), strict=True)
        return _added([(log_p.exp() * (log_p - log_q)).sum(dim=-1) for log_p, log_q in pairs])

    def _log_p(self, params: Tensor) -> list[Tensor]:
        return [torch.log_softmax(part, dim=-1) for part in _split(params, self._sizes)]

    def _chosen(self, each: list[Tensor], action: Tensor) -> Tensor:
        """`[B]`. PyTorch's negative likelihood picks as `gather` does, and is several times as fast backward."""
        action = action.reshape(-1, len(self._sizes))
        unlikely = [nll_loss(log_p, action[:, index], reduction="none") for index, log_p in enumerate(each)]
        return -_added(unlikely)


class DiagonalGaussian:
    """A box of independent normals. Samples are not bounded; the environment adapter clips them to the box."""

    def __init__(self, leaf: Leaf) -> None:
        self._shape = leaf.shape
        self._size = leaf.size
        self.parameters = 2 * leaf.size

    def _split(self, params: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = _split(params, [self._size, self._size])
        return mean, log_std.clamp(*LOG_STD_BOUNDS)

    def sample(self, params: Tensor, generator: torch.Generator) -> Tensor:
        mean, log_std = self._split(params)
        noise = torch.empty_like(mean).normal_(generator=generator)
        return (mean + log_std.exp() * noise).reshape(-1, *self._shape)

    def mode(self, params: Tensor) -> Tensor:
        return self._split(params)[0].reshape(-1, *self._shape)

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        mean, log_std = self._split(params)
        z = (action.reshape(params.shape[0], self._size) - mean) * (-log_std).exp()
        return (-0.5 * z.square() - log_std - HALF_LOG_2PI).sum(dim=-1)

    def entropy(self, params: Tensor) -> Tensor:
        _, log_std = self._split(params)
        return (0.5 + HALF_LOG_2PI + log_std).sum(dim=-1)

    def log_prob_and_entropy(self, params: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        return self.log_prob(params, action), self.entropy(params)

    def divergence(self, params: Tensor, other: Tensor) -> Tensor:
        """Sum over the elements of log σ_q − log σ_p + (σ_p² + (μ_p − μ_q)²) / 2 σ_q² − ½."""
        (mean, log_std), (other_mean, other_log_std) = self._split(params), self._split(other)
        spread = (2 * (log_std - other_log_std)).exp() + ((mean - other_mean) * (-other_log_std).exp()).square()
        return (other_log_std - log_std + 0.5 * spread - 0.5).sum(dim=-1)


class ActionDistribution:
    """The joint distribution over all leaves of an action space; actions are dicts of columns."""

    draws = True

    def __init__(self, action: SpaceSpec) -> None:
        self.names = action.column_names("action")
        self._leaves = [_leaf_distribution(leaf) for leaf in action.leaves]
        self._sizes = [leaf.parameters for leaf in self._leaves]
        self.parameters = sum(self._sizes)

    def _parts(self, params: Tensor) -> Iterator[tuple[str, Categorical | DiagonalGaussian, Tensor]]:
        return zip(self.names, self._leaves, _split(params, self._sizes), strict=True)

    def sample(self, params: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """`[B, P]` → a random joint action, `[B, …leaf shape]` each."""
        return {name: leaf.sample(part, generator) for name, leaf, part in self._parts(params)}

    def mode(self, params: Tensor) -> dict[str, Tensor]:
        return {name: leaf.mode(part) for name, leaf, part in self._parts(params)}

    def log_prob(self, params: Tensor, actions: Mapping[str, Tensor]) -> Tensor:
        """`[B]`, natural logarithm."""
        return _added([leaf.log_prob(part, actions[name]) for name, leaf, part in self._parts(params)])

    def probabilities(self, params: Tensor) -> Tensor:
        """`[B, sum of nvec]`: of each option of each choice of all leaves, side by side; boxes have none."""
        parts = [leaf.probabilities(part) for _, leaf, part in self._parts(params) if isinstance(leaf, Categorical)]
        return torch.cat(parts, dim=1) if parts else params.new_zeros(len(params), 0)

    def entropy(self, params: Tensor) -> Tensor:
        """`[B]`, nats."""
        return _added([leaf.entropy(part) for _, leaf, part in self._parts(params)])

    def log_prob_and_entropy(self, params: Tensor, actions: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Both `[B]`, with what they have in common computed once."""
        both = [leaf.log_prob_and_entropy(part, actions[name]) for name, leaf, part in self._parts(params)]
        return _added([log_prob for log_prob, _ in both]), _added([entropy for _, entropy in both])

    def divergence(self, params: Tensor, other: Tensor) -> Tensor:
        """`[B]`, nats: the Kullback-Leibler divergence of the distribution of `params` from that of `other`."""
        parts = zip(self._leaves, _split(params, self._sizes), _split(other, self._sizes), strict=True)
        return _added([leaf.divergence(part, of_other) for leaf, part, of_other in parts])


def _split(params: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    return (params,) if len(sizes) == 1 else torch.split_with_sizes(params, sizes, dim=-1)


def _added(parts: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.add, parts)


def _entropy(log_p: Tensor) -> Tensor:
    return -(log_p.exp() * log_p).sum(dim=-1)


def _leaf_distribution(leaf: Leaf) -> Categorical | DiagonalGaussian:
    if leaf.kind != "box":
        return Categorical(leaf)
    if leaf.dtype not in {"float32", "float64"}:
        raise UnsupportedSpace(f"action {leaf.path or 'space'}: a Box of {leaf.dtype} cannot be sampled; use floats")
    return DiagonalGaussian(leaf)
