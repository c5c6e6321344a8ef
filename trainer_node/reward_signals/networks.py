"""The networks that signals are made of: a value of observations, and embeddings of observations."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor, nn

from shared.policies.encoders import Encoder, ObservationNormaliser, linear
from shared.policies.policy import Policy


class ValueNetwork(nn.Module):
    """What a signal's discounted return will be: the policy's layers, in a network of its own, without a core.

    Observations are normalised as the policy has them normalised.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.encoder = Encoder(policy.spaces.observation, policy.config)
        self.head = linear(self.encoder.features, 1, 1.0)

    def forward(self, observations: Mapping[str, Tensor], normaliser: ObservationNormaliser | None) -> Tensor:
        """`[B]`."""
        value: Tensor = self.head(self.encoder(observations, normaliser)).squeeze(-1)
        return value


class Embedding(nn.Module):
    """Observations → `[B, size]`, float32: the policy's kind of encoder with layers of its own and ReLU."""

    def __init__(self, policy: Policy, hidden_sizes: tuple[int, ...], size: int) -> None:
        super().__init__()
        config = policy.config.model_copy(update={"hidden_sizes": hidden_sizes, "activation": "relu"})
        self.encoder = Encoder(policy.spaces.observation, config)
        self.head = linear(self.encoder.features, size, math.sqrt(2))

    def forward(self, observations: Mapping[str, Tensor], normaliser: ObservationNormaliser | None) -> Tensor:
        """`[B, size]`."""
        embedded: Tensor = self.head(self.encoder(observations, normaliser))
        return embedded
