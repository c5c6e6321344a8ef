"""Generative adversarial imitation (Ho and Ermon 2016): a step is worth how much it looks like a demonstrated one.

A discriminator learns to tell the run's steps from demonstrated ones; with a gradient penalty (Gulrajani et al. 2017),
since one that can tell them apart with certainty says nothing about which way is better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from shared.errors import ConfigError
from shared.policies.encoders import ACTIVATIONS, Encoder, ObservationNormaliser, linear
from shared.policies.policy import Policy
from shared.reward_signals_config import GAILConfig
from trainer_node.demonstrations import Demonstrations
from trainer_node.reward_signals.actions import ActionEncoding
from trainer_node.reward_signals.signal import Rows, Signal

_CLIP = 10.0
"""Bound of a normalised observation, in standard deviations."""


class GAIL(Signal):
    """The discriminator, and the statistics that observations are normalised with."""

    needs_next: ClassVar[bool] = False
    scaled: ClassVar[bool] = False

    def __init__(self, policy: Policy, config: GAILConfig, demonstrations: Demonstrations | None) -> None:
        super().__init__()
        if demonstrations is None:
            raise ConfigError("algorithm.reward_signals.gail imitates nothing without demonstrations.path")
        self._demonstrations = demonstrations
        self._penalty = config.gradient_penalty
        self.actions = ActionEncoding(policy.spaces.action) if config.use_actions else None
        self.normaliser = ObservationNormaliser(policy.spaces.observation, _CLIP)
        self.inputs = Encoder(policy.spaces.observation, policy.config.model_copy(update={"hidden_sizes": ()}))
        width = self.inputs.features + (self.actions.size if self.actions is not None else 0)
        layers: list[nn.Module] = []
        for size in config.hidden_sizes:
            layers += [linear(width, size, math.sqrt(2)), ACTIVATIONS["tanh"]()]
            width = size
        self.mlp = nn.Sequential(*layers, linear(width, 1, 1.0))
        self.register_buffer("begun", torch.zeros((), dtype=torch.bool))

    def observe(self, observations: Mapping[str, Tensor]) -> None:
        """The statistics take them in, and before all others those that were demonstrated."""
        begun = cast(Tensor, self.begun)
        if not begun:
            shown = self._demonstrations.columns
            self.normaliser.update({name: torch.from_numpy(shown[name]).to(begun.device) for name in observations})
            begun.fill_(True)
        self.normaliser.update(observations)

    def reward(self, rows: Rows) -> Tensor:
        """−ln(1 − D), where D is how probable it is that the step was demonstrated."""
        return functional.softplus(self._judged(self._features(rows.observations, rows.actions)))

    def loss(self, rows: Rows, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross-entropy on these steps and as many demonstrated ones, with the penalty on what lies between them."""
        shown = self._demonstrations.draw(len(rows), generator, next(self.parameters()).device)
        features = [self._features(drawn.observations, drawn.actions) for drawn in (shown, rows)]
        ours, theirs = (self._judged(part) for part in reversed(features))
        loss = functional.softplus(-theirs).mean() + functional.softplus(ours).mean()
        terms = {
            "train/gail_loss": loss.detach(),
            "train/gail_demonstrated": torch.sigmoid(theirs.detach()).mean(),
            "train/gail_acted": torch.sigmoid(ours.detach()).mean(),
        }
        mixture = torch.rand(len(rows), 1, generator=generator).to(loss.device)
        between = (mixture * features[0] + (1 - mixture) * features[1]).detach().requires_grad_(True)
        (slope,) = torch.autograd.grad(self._judged(between).sum(), between, create_graph=True)
        return loss + self._penalty * (slope.norm(dim=1) - 1.0).square().mean(), terms

    def _features(self, observations: Mapping[str, Tensor], actions: Mapping[str, Tensor]) -> Tensor:
        features: Tensor = self.inputs(observations, self.normaliser)
        return features if self.actions is None else torch.cat([features, self.actions(actions)], dim=1)

    def _judged(self, features: Tensor) -> Tensor:
        """`[B]`: ln D − ln(1 − D)."""
        judged: Tensor = self.mlp(features).squeeze(1)
        return judged
