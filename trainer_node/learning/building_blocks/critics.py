"""Critics of algorithms whose policy is an actor alone: several Q networks of equal shape, computed as one.

They stay with the trainer. A layer of all of them is one batched product, since the networks are small and launching
an operation costs more than its arithmetic.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from stagecoach.shared.config.sections import PolicyConfig
from stagecoach.shared.experience.spaces import SpaceSpec
from stagecoach.shared.policies.encoders import (
    ACTIVATIONS,
    Encoder,
    ObservationNormalizer,
    ParallelLayerNorm,
    unrounded,
)


class Critics(nn.Module):
    """`count` networks from an observation and `action_size` elements of an action to `outputs` values each. They share
    the convolutions of images alone, as in Stable-Baselines3."""

    def __init__(
        self, observation: SpaceSpec, config: PolicyConfig, *, count: int, action_size: int = 0, outputs: int = 1
    ) -> None:
        super().__init__()
        self.inputs = Encoder(observation, config.model_copy(update={"hidden_sizes": ()}))
        self._activation = ACTIVATIONS[config.activation]()
        sizes = [self.inputs.features + action_size, *config.hidden_sizes, outputs]
        gains = [math.sqrt(2)] * len(config.hidden_sizes) + [1.0]
        self.weights = nn.ParameterList(
            _orthogonal(count, before, after, gain) for before, after, gain in zip(sizes, sizes[1:], gains)
        )
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(count, 1, size)) for size in sizes[1:])
        normalized = config.hidden_sizes if config.layer_norm else ()
        self.norms = nn.ModuleList(ParallelLayerNorm(count, size) for size in normalized)

    def forward(
        self, observations: Mapping[str, Tensor], normalizer: ObservationNormalizer | None, actions: Tensor | None,
        first_only: bool = False,
    ) -> Tensor:  # fmt: skip
        """Returns `[C, B, outputs]`, or `[1, B, outputs]` of the first alone; `actions` are `[B, D]`."""
        features: Tensor = self.inputs(observations, normalizer)
        if actions is not None:
            features = torch.cat([features, actions], dim=1)
        return self._values(features, 1 if first_only else len(self.weights[0]))

    def of_each(
        self, observations: Mapping[str, Tensor], normalizer: ObservationNormalizer | None, actions: Tensor
    ) -> Tensor:
        """Returns `[C, B, A]` for A actions per observation, `[B, A, D]`; observations are encoded once."""
        rows, count, _ = actions.shape
        features = self.inputs(observations, normalizer).unsqueeze(1).expand(-1, count, -1)
        values = self._values(torch.cat([features, actions], dim=2).flatten(0, 1), len(self.weights[0]))
        return values.reshape(-1, rows, count)

    def _values(self, features: Tensor, count: int) -> Tensor:
        values = features.expand(count, -1, -1)
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            if number:
                values = self._activation(self.norms[number - 1](values) if self.norms else values)
            values = torch.baddbmm(bias[:count], values, weight[:count])
        return unrounded(values)


def _orthogonal(count: int, inputs: int, outputs: int, gain: float) -> nn.Parameter:
    made = torch.empty(count, outputs, inputs)
    for weight in made:
        nn.init.orthogonal_(weight, gain)
    return nn.Parameter(made.transpose(1, 2).contiguous())
