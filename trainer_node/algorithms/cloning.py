"""Behavioural cloning beside an algorithm that learns by rewards: a term of the policy's loss that is annealed.

In: the run's demonstrations. Each gradient step of the policy clones a minibatch of them, drawn by a generator that
follows from the number of the update. While the strength is 0 nothing is drawn, and every bit is as without cloning.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shared.algorithm_configs.cloning import CloningConfig
from shared.errors import ConfigError
from shared.policies.actor import Certain
from shared.policies.policy import Policy
from shared.steps import Counters
from trainer_node.algorithms.algorithm import Setting
from trainer_node.algorithms.experience import update_seed
from trainer_node.algorithms.pairs import Pairs
from trainer_node.algorithms.share import Share, Terms

_NUMBER = 0
"""Of its generator among those of an update, beside the algorithm's own."""


class Cloning:
    """What one policy clones."""

    def __init__(self, config: CloningConfig, policy: Policy, setting: Setting) -> None:
        if setting.demonstrations is None:
            raise ConfigError("algorithm.behavioural_cloning clones nothing without demonstrations.path")
        self._config = config
        self._policy = policy
        self._seed, self._device = setting.seed, setting.device
        self._demonstrations = setting.demonstrations
        self._strength = 0.0
        self._generator = torch.Generator()

    def begin(self, counters: Counters) -> dict[str, float]:
        """An update begins; answers what goes by a schedule, as metrics."""
        self._strength = self._config.strength.value(counters)
        seed = update_seed(update_seed(self._seed, counters.updates), _NUMBER)
        self._generator = torch.Generator().manual_seed(seed)
        return {"train/cloning_strength": self._strength}

    def beside(self, share: Share, terms: Terms) -> Terms:
        """The loss of a gradient step and its terms, and with them, where anything is cloned, strength × cloning loss.

        Of the demonstrations' minibatch, as of the other one, our share is learnt from.
        """
        if not self._strength:
            return terms
        drawn = self._demonstrations.draw(self._config.minibatch_size, self._generator, self._device)
        errors = self.errors(drawn.take(share.rows(len(drawn))))
        cloned = share.mean(errors, len(drawn))
        loss, others = terms
        return loss + self._strength * cloned, others | {"train/cloning_loss": cloned.detach()}

    def errors(self, pairs: Pairs) -> Tensor:
        """`[B]`: −log π(a|s); for a policy without probabilities, mean squared difference of actions in [-1, 1]."""
        distribution, params = self._policy.distribution, self._policy.action_parameters(pairs.observations)
        if not isinstance(distribution, Certain):
            return -distribution.log_prob(params, pairs.actions)
        done = distribution.bounds.flat(pairs.actions).clamp(-1.0, 1.0)
        return (torch.tanh(params) - done).square().mean(dim=1)


def make_cloning(config: CloningConfig | None, policy: Policy, setting: Setting) -> Cloning | None:
    """None where nothing is to be cloned."""
    return None if config is None else Cloning(config, policy, setting)
