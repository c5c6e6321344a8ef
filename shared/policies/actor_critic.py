"""The actor-critic policy: what a worker acts with and the trainer learns, the same class on both sides."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shared.config import PolicyConfig
from shared.policies.distributions import ActionDistribution
from shared.policies.encoders import Encoder, linear, unrounded
from shared.policies.policy import Policy
from shared.spaces import PolicySpaces


class Heads(Policy):
    """Action head and value head; a subclass says upon which features."""

    distribution: ActionDistribution

    def __init__(self, spaces: PolicySpaces, config: PolicyConfig) -> None:
        super().__init__(spaces, config)
        self.distribution = ActionDistribution(spaces.action)

    def _make_heads(self, actor_features: int, critic_features: int) -> None:
        self.head = linear(actor_features, self._head_width(), 0.01)
        self.value_head = linear(critic_features, 1, 1.0)
        self._gaussians = [leaf.size if leaf.kind == "box" else 0 for leaf in self.spaces.action.leaves]
        self.log_std = nn.Parameter(torch.full((sum(self._gaussians),), self.config.log_std_init))

    def _head_width(self) -> int:
        return self.distribution.parameters - sum(leaf.size for leaf in self.spaces.action.leaves if leaf.kind == "box")

    def _value(self, features: Tensor) -> Tensor:
        """`[…, F]` → `[…]`, float32 in whichever precision the networks compute."""
        value: Tensor = self.value_head(features)
        return unrounded(value).squeeze(-1)

    def _with_deviations(self, features: Tensor) -> Tensor:
        """The head's outputs, with the state-independent log σ of each Gaussian leaf put behind its means."""
        outputs: Tensor = unrounded(self.head(features))
        if not any(self._gaussians):
            return outputs
        parts, out_at, std_at = [], 0, 0
        for leaf, gaussian in zip(self.spaces.action.leaves, self._gaussians, strict=True):
            width = gaussian or sum(leaf.nvec)
            parts.append(outputs[:, out_at : out_at + width])
            out_at += width
            if gaussian:
                parts.append(self.log_std[std_at : std_at + gaussian].expand(outputs.shape[0], -1))
                std_at += gaussian
        return torch.cat(parts, dim=1)


class ActorCritic(Heads):
    """Encoder(s) and heads."""

    kind = "actor_critic"

    def __init__(self, spaces: PolicySpaces, config: PolicyConfig) -> None:
        super().__init__(spaces, config)
        self.actor = Encoder(spaces.observation, config)
        self.critic = self.actor if config.share_encoder else Encoder(spaces.observation, config)
        self._make_heads(self.actor.features, self.critic.features)

    def action_parameters(self, observations: Mapping[str, Tensor]) -> Tensor:
        """`[B, P]` for `self.distribution`."""
        return self._with_deviations(self.actor(observations, self.normaliser))

    def value(self, observations: Mapping[str, Tensor]) -> Tensor:
        """`[B]`: the critic's estimate of the discounted return."""
        return self._value(self.critic(observations, self.normaliser))

    def action_parameters_and_value(self, observations: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Both, with one pass through a shared encoder."""
        features = self.actor(observations, self.normaliser)
        critic = features if self.critic is self.actor else self.critic(observations, self.normaliser)
        return self._with_deviations(features), self._value(critic)
