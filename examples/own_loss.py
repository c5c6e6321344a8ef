"""Losses of your own, each a few lines on a built-in algorithm: `stagecoach train examples/own_loss.yaml`."""

import torch
from pydantic import Field
from torch import Tensor

import stagecoach as sc


class SimplePolicyOptimization(sc.PPO):
    """PPO whose ratio is pulled back by a square instead of being clipped (Xie et al. 2024, eq. 8)."""

    Config = sc.PPOConfig

    def surrogate(self, ratio: Tensor, advantage: Tensor, clip: float) -> Tensor:
        return advantage * ratio - advantage.abs() * (ratio - 1).square() / (2 * clip)


class SoftDQNConfig(sc.DQNConfig):
    temperature: float = Field(0.1, gt=0)
    """Units of the values in which choices count as equally good."""


class SoftDQN(sc.DQN):
    """DQN that bootstraps from the soft maximum (Haarnoja et al. 2017, eq. 3); for `head: expected`."""

    Config = SoftDQNConfig

    def __init__(self, policy: sc.QNetwork, config: SoftDQNConfig, setting: sc.Setting) -> None:
        super().__init__(policy, config, setting)
        self.temperature = config.temperature

    def bootstrap(self, batch: sc.Minibatch, choosing: object, bootstrapping: object) -> Tensor:
        values = self.policy.means(self.target.outputs(batch.next_observations))
        legal = self.policy.legal(values, batch.next_observations)  # [heads, B, choices]
        soft: Tensor = self.temperature * torch.logsumexp(legal / self.temperature, dim=2)
        return soft.reshape(-1, 1)


class GentleSAC(sc.SAC):
    """SAC that also pays for large means, so that actions stay off the bounds."""

    Config = sc.SACConfig

    def actor_loss(self, batch: sc.Minibatch, noise: Tensor) -> tuple[Tensor, Tensor]:
        loss, entropies = super().actor_loss(batch, noise)
        mean = self.policy.action_parameters(batch.observations).chunk(2, dim=1)[0]
        return loss + 1e-3 * (batch.weight * mean.square().sum(dim=1)).mean(), entropies
