"""A network of your own, residual blocks behind the built-in encoder: `stagecoach train examples/own_network.yaml`."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

import stagecoach as sc


class Residual(sc.Encoder):
    """Observation columns to `features` numbers each; the blocks are added to what `hidden_sizes` compute."""

    def __init__(self, observation: sc.SpaceSpec, config: sc.PolicyConfig, blocks: int) -> None:
        super().__init__(observation, config)  # convolutions, one-hot choices and `hidden_sizes`
        size = self.features
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(size), nn.Linear(size, size), nn.ReLU(), nn.Linear(size, size))
            for _ in range(blocks)
        )

    def forward(self, observations: Mapping[str, Tensor], normalizer: sc.ObservationNormalizer | None) -> Tensor:
        features = super().forward(observations, normalizer)
        for block in self.blocks:
            features = features + block(features)
        return features


class ResidualPolicy(sc.Policy):
    """Gives its encoder to each of the policies below; `blocks` comes from the config."""

    def __init__(self, spaces: sc.PolicySpaces, config: sc.PolicyConfig, *, blocks: int = 2, **network: Any) -> None:
        self.count = blocks  # before `super().__init__`, which makes the encoders
        super().__init__(spaces, config, **network)

    def make_encoder(self, observation: sc.SpaceSpec, config: sc.PolicyConfig) -> sc.Encoder:
        return Residual(observation, config, self.count)


class ResidualActorCritic(ResidualPolicy, sc.ActorCritic):
    """For ppo, a2c, appo and impala."""


class ResidualQNetwork(ResidualPolicy, sc.QNetwork):
    """For dqn and rainbow."""


class ResidualActor(ResidualPolicy, sc.Actor):
    """For sac; its critics keep the built-in network."""
