"""Random network distillation (Burda et al. 2019): a step is worth what is wrong in predicting where it led.

A predictor learns the outputs of a fixed, random network. It is right about observations like those it has learnt, so
its error says how new an observation is.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shared.policies.encoders import ObservationNormaliser
from shared.policies.policy import Policy
from shared.reward_signals_config import RNDConfig
from trainer_node.reward_signals.networks import Embedding
from trainer_node.reward_signals.signal import Rows, Signal

_CLIP = 5.0
"""Bound of a normalised observation, in standard deviations (section 2.4)."""


class RND(Signal):
    """Target, predictor, and the statistics that observations are normalised with."""

    def __init__(self, policy: Policy, config: RNDConfig) -> None:
        super().__init__()
        self.normaliser = ObservationNormaliser(policy.spaces.observation, _CLIP)
        self.target = Embedding(policy, config.hidden_sizes, config.embedding_size).requires_grad_(False)
        self.predictor = Embedding(policy, config.hidden_sizes, config.embedding_size)

    def observe(self, observations: Mapping[str, Tensor]) -> None:
        """The statistics take them in."""
        self.normaliser.update(observations)

    def reward(self, rows: Rows) -> Tensor:
        """The error on the next observations."""
        return self._errors(rows)

    def loss(self, rows: Rows, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean error."""
        loss = self._errors(rows).mean()
        return loss, {"train/rnd_loss": loss.detach()}

    def _errors(self, rows: Rows) -> Tensor:
        """`[B]`: ‖f̂(s′) − f(s′)‖², as the mean over the embedding."""
        predicted, wanted = (net(rows.next_observations, self.normaliser) for net in (self.predictor, self.target))
        errors: Tensor = (predicted - wanted).square().mean(dim=1)
        return errors
