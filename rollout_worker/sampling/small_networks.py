"""Acting with a small MLP without PyTorch, whose calls cost more than the arithmetic of a few rows.

Which policies act so follows from the config and the environment alone, never from a clock or a machine: a successor
repeats its predecessor bit for bit. Parameters differ from PyTorch's by rounding; drawing from them does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from stagecoach.rollout_worker.exploration.base import Exploration, Sampling
from stagecoach.shared.experience.spaces import Array, Columns, Leaf
from stagecoach.shared.policies.actor_critic import ActorCritic
from stagecoach.shared.policies.distributions import LOG_STD_BOUNDS
from stagecoach.shared.policies.encoders import Encoder, RunningMoments, Tanh
from stagecoach.shared.policies.policy import Policy

_MOST, _MOST_VECTOR = 1 << 18, 9_215
"""Largest product of a layer's rows, inputs and outputs (where one of them is 1): OpenBLAS uses several threads for
larger products, so that sums would depend on the number of cores."""
_ACTIVATIONS: dict[type[nn.Module], Callable[[Array], Array]] = {
    Tanh: lambda values: np.tanh(values, out=values),
    nn.ReLU: lambda values: np.maximum(values, 0, out=values),
}
_Activation = Callable[[Array], Array] | None


class SmallNetwork:
    """Acts for the steps of one fragment, with an `ActorCritic` on vectors."""

    def __init__(
        self, policy: ActorCritic, modules: Sequence[nn.Module], rows: int, steps: int, generator: torch.Generator
    ) -> None:
        """Draws the noise of all steps from `generator`; `modules` are the policy's layers and activations."""
        self._leaves = policy.spaces.observation.own.leaves
        moments = None if policy.normalizer is None else policy.normalizer.moments
        self._moments = [None if moments is None else _numpy(moments[str(i)]) for i in range(len(self._leaves))]
        self._layers: list[tuple[Array, Array, Array, _Activation]] = []
        for module in modules:
            if isinstance(module, nn.Linear):
                weight, bias = _array(module.weight), _array(module.bias)
                out = np.empty((rows, len(bias)), np.float32)
                self._layers.append((np.ascontiguousarray(weight.T), bias, out, None))
            else:
                self._layers[-1] = (*self._layers[-1][:3], _ACTIVATIONS[type(module)])
        self._params = np.empty((steps, rows, policy.distribution.parameters), np.float32)
        self._draws = list(self._drawing(policy, rows, steps, generator))
        self._step = 0

    def _drawing(self, policy: ActorCritic, rows: int, steps: int, generator: torch.Generator) -> Any:
        """Yields, for each leaf: it, where its outputs and parameters begin, and its noise `[T, S, …]`."""
        output_at, at, std_at = 0, 0, 0
        for leaf in policy.spaces.action.leaves:
            if leaf.nvec:
                width = sum(leaf.nvec)
                noise = torch.empty(steps, rows, width).exponential_(generator=generator).log_()
                yield leaf, output_at, at, noise.numpy()
                at += width
            else:
                width = leaf.size
                log_std = policy.log_std.detach()[std_at : std_at + width]
                noise = torch.empty(steps, rows, width).normal_(generator=generator)
                yield leaf, output_at, at, (noise * log_std.clamp(*LOG_STD_BOUNDS).exp()).numpy()
                self._params[:, :, at + width : at + 2 * width] = log_std.numpy()
                at, std_at = at + 2 * width, std_at + width
            output_at += width

    @classmethod
    def of(
        cls, policy: Policy, exploration: Exploration, rows: int, steps: int, generator: torch.Generator
    ) -> SmallNetwork | None:
        """Returns None if PyTorch acts: for the user's own networks, other kinds, images, choices and large layers."""
        if type(exploration) is not Sampling or type(policy) is not ActorCritic or type(policy.actor) is not Encoder:
            return None
        leaves, device = policy.spaces.observation.leaves, generator.device.type
        if device != "cpu" or any(leaf.nvec or leaf.is_image or leaf.mask for leaf in leaves):
            return None
        modules = [*policy.actor.mlp, policy.head]
        fits = all(_fits(its, rows) if type(its) is nn.Linear else type(its) in _ACTIVATIONS for its in modules)
        return cls(policy, modules, rows, steps, generator) if fits else None

    def act(self, observations: Columns) -> Columns:
        params, noisy = self._params[self._step], self._step
        with np.errstate(all="ignore"):  # observations that are not finite are rejected with the fragment
            values = self._features(observations)
            for weight, bias, out, activation in self._layers:
                np.matmul(values, weight, out=out)
                out += bias
                values = out if activation is None else activation(out)
            self._step += 1
            return {leaf.column("action"): _drawn(leaf, values[:, output_at:], params[:, at:], noise[noisy])
                    for leaf, output_at, at, noise in self._draws}  # fmt: skip

    def _features(self, observations: Columns) -> Array:
        parts = []
        for leaf, moments in zip(self._leaves, self._moments):
            values = observations[leaf.column("obs")].reshape(-1, leaf.size)
            parts.append(values.astype(np.float32, copy=False) if moments is None else _normalized(values, *moments))
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    @property
    def params(self) -> torch.Tensor:
        return torch.from_numpy(self._params[: self._step]).flatten(0, 1)


def _drawn(leaf: Leaf, outputs: Array, params: Array, noise: Array) -> Array:
    """Draws as `ActionDistribution.sample` does, and writes the outputs to `params`."""
    width = noise.shape[1]
    outputs = outputs[:, :width]
    params[:, :width] = outputs
    if not leaf.nvec:
        return (outputs + noise).reshape(-1, *leaf.shape)
    scores = outputs - noise
    if len(leaf.nvec) == 1:
        return cast(Array, scores.argmax(axis=1).reshape(-1, *leaf.shape))
    parts = np.split(scores, np.cumsum(leaf.nvec[:-1]), axis=1)
    return np.stack([part.argmax(axis=1) for part in parts], axis=1).reshape(-1, *leaf.shape)


def _fits(layer: nn.Linear, rows: int) -> bool:
    most = _MOST_VECTOR if 1 in (rows, layer.out_features) else _MOST
    return rows * layer.in_features * layer.out_features <= most


def _array(tensor: torch.Tensor) -> Array:
    return tensor.detach().numpy()


def _numpy(module: nn.Module) -> tuple[Array, ...]:
    assert isinstance(module, RunningMoments)
    return tuple(_array(getattr(module, name)) for name in ("mean", "shift", "scale", "bound"))


def _normalized(values: Array, mean: Array, shift: Array, scale: Array, bound: Array) -> Array:
    """Computes what `RunningMoments.forward` does."""
    if values.dtype.itemsize > 2 and values.dtype != np.float32:
        moved = (values.astype(np.float64) - mean).astype(np.float32)
    else:
        moved = values.astype(np.float32, copy=False) - shift
    moved *= scale
    np.minimum(moved, bound, out=moved)
    return np.maximum(moved, -bound, out=moved)
