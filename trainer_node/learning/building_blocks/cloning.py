"""Behavioral cloning as an annealed term of a policy's loss, in addition to rewards.

Each gradient step of the policy clones a minibatch of demonstrations, drawn by a generator seeded with the number of
the update. While the strength is 0 nothing is drawn, and every bit is as without cloning.
"""

import torch
from torch import Tensor

from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.config.algorithms.base import CloningConfig, MarginCloningConfig
from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.policies.continuous import Certain
from stagecoach.shared.policies.policy import Policy
from stagecoach.shared.policies.q_network import BestChoice
from stagecoach.trainer_node.learning.building_blocks.demonstrations import Pairs
from stagecoach.trainer_node.learning.building_blocks.interface import Setting, Shard, Terms, update_seed

_NUMBER = 0
"""Number of its generator among those of an update."""


class Cloning:
    """Cloning term of one policy; inactive without a `config`."""

    def __init__(self, config: CloningConfig | None, policy: Policy, setting: Setting) -> None:
        if config is not None and setting.demonstrations is None:
            raise ConfigError("algorithm.behavioral_cloning clones nothing without demonstrations.path")
        self._config, self._policy, self._setting = config, policy, setting
        self.demonstrations = setting.demonstrations
        self._strength = 0.0
        self.generator = torch.Generator()

    def begin(self, counters: Counters) -> None:
        if self._config is not None:
            self._strength = self._config.strength.value(counters)
            self.generator.manual_seed(update_seed(update_seed(self._setting.seed, counters.updates), _NUMBER))

    @property
    def metrics(self) -> dict[str, float]:
        return {} if self._config is None else {"train/cloning_strength": self._strength}

    def beside(self, shard: Shard, terms: Terms) -> Terms:
        """Returns a gradient step's loss and terms, plus strength × cloning loss while it is above 0."""
        if self._config is None or self.demonstrations is None or not self._strength:
            return terms
        drawn = self.demonstrations.draw(self._config.minibatch_size, self.generator, self._setting.device)
        cloned = shard.mean(self.errors(drawn.take(shard.rows(len(drawn)))), len(drawn))
        loss, others = terms
        return loss + self._strength * cloned, others | {"train/cloning_loss": cloned.detach()}

    def errors(self, pairs: Pairs) -> Tensor:
        """Returns `[B]`: −log π(a|s); without probabilities, the mean squared difference of actions in [-1, 1]; for a Q
        network, max_a (Q(s, a) + margin if a ≠ a_E) − Q(s, a_E) (J_E of Hester et al. 2018)."""
        distribution, params = self._policy.distribution, self._policy.action_parameters(pairs.observations)
        if isinstance(distribution, BestChoice):
            assert isinstance(self._config, MarginCloningConfig)
            (action,) = pairs.actions.values()
            chosen = action.reshape(-1, 1)
            raised = (params + self._config.margin).scatter(1, chosen, params.gather(1, chosen))
            return raised.amax(dim=1) - params.gather(1, chosen).squeeze(1)
        if not isinstance(distribution, Certain):
            return -distribution.log_prob(params, pairs.actions)
        done = distribution.bounds.flat(pairs.actions)
        return (torch.tanh(params) - done).square().mean(dim=1)
