"""Intrinsic curiosity (Pathak et al. 2017): a step is worth what is wrong in predicting where the action would lead.

Predicted are features of the next observation. Features are learnt by telling from two observations which action was
between them, so what the agent has no influence on leaves no trace in them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shared.policies.encoders import ACTIVATIONS, ObservationNormaliser, linear
from shared.policies.policy import Policy
from shared.reward_signals_config import ICMConfig
from trainer_node.reward_signals.actions import ActionEncoding
from trainer_node.reward_signals.networks import Embedding
from trainer_node.reward_signals.signal import Rows, Signal

_CLIP = 5.0


class ICM(Signal):
    """Features, forward and inverse model, and the statistics that observations are normalised with."""

    def __init__(self, policy: Policy, config: ICMConfig) -> None:
        super().__init__()
        self._forward_weight = config.forward_weight
        self.actions = ActionEncoding(policy.spaces.action)
        self.normaliser = ObservationNormaliser(policy.spaces.observation, _CLIP)
        size, hidden = config.embedding_size, config.model_sizes
        self.features = Embedding(policy, config.hidden_sizes, size)
        self.forward_model = _mlp(size + self.actions.size, hidden, size)
        self.inverse_model = _mlp(2 * size, hidden, self.actions.size)

    def observe(self, observations: Mapping[str, Tensor]) -> None:
        """The statistics take them in."""
        self.normaliser.update(observations)

    def reward(self, rows: Rows) -> Tensor:
        """The forward model's error (equation 7, without η: rewards are scaled)."""
        return self._errors(rows)[0]

    def loss(self, rows: Rows, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Both models' losses, weighed as in equation 8."""
        forward, inverse = (errors.mean() for errors in self._errors(rows))
        loss = (1 - self._forward_weight) * inverse + self._forward_weight * forward
        terms = {"train/icm_loss": loss, "train/icm_forward_loss": forward, "train/icm_inverse_loss": inverse}
        return loss, {name: value.detach() for name, value in terms.items()}

    def _errors(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """`[B]` of the forward and of the inverse model: ½ ‖φ̂(s′) − φ(s′)‖², and how wrong the guessed action is."""
        here, there = (self.features(seen, self.normaliser) for seen in (rows.observations, rows.next_observations))
        action = self.actions(rows.actions)
        predicted = self.forward_model(torch.cat([here, action], dim=1))
        guessed = self.inverse_model(torch.cat([here, there], dim=1))
        return 0.5 * (predicted - there).square().sum(dim=1), self.actions.errors(guessed, action)


def _mlp(inputs: int, hidden: tuple[int, ...], outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [linear(inputs, size, 2**0.5), ACTIVATIONS["relu"]()]
        inputs = size
    return nn.Sequential(*layers, linear(inputs, outputs, 1.0))
