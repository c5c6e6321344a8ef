"""A package of a user's, written to a folder of the test's own: an algorithm with a policy class of its own."""

TEXT = '''
import torch
from torch import nn

from stagecoach.shared.config.algorithms.base import AlgorithmConfig
from stagecoach.shared.policies.distributions import ActionDistribution
from stagecoach.shared.policies.policy import Policy
from stagecoach.shared.policies.registry import register_policy
from stagecoach.trainer_node.learning.building_blocks.interface import side_by_side
from stagecoach.trainer_node.learning.building_blocks.interface import Shard


@register_policy
class Table(Policy):
    """The same preferences whatever is observed."""

    kind = "my_table"

    def __init__(self, spaces, config, **network):
        super().__init__(spaces, config, **network)
        self.distribution = ActionDistribution(spaces.action)
        self.preferences = nn.Parameter(torch.full((self.distribution.parameters,), float(network["start"])))

    def action_parameters(self, observations):
        return self.preferences.expand(len(next(iter(observations.values()))), -1)


class Bandit:
    """Prefers what was rewarded more than on average; keeps a count of its own in each checkpoint."""

    class Config(AlgorithmConfig):
        """Its fields."""

        policy = "my_table"
        step: float = 0.1
        """How far preferences move."""

        def network(self):
            return {"start": 0.25}

        def validate_run(self, run):
            if run.rollout.max_policy_lag:
                raise ValueError("the bandit wants rollout.max_policy_lag=0")

    def __init__(self, policy, config, setting):
        self.policy, self.shard, self._config, self._seen = policy, Shard(), config, 0

    def update(self, experience, counters):
        columns = side_by_side(experience)
        reward = torch.from_numpy(columns["reward"].copy()).flatten()
        action = torch.from_numpy(columns["action"].copy()).flatten()
        with torch.no_grad():
            self.policy.preferences.index_add_(0, action, self._config.step * (reward - reward.mean()))
        self._seen += len(reward)
        return {"train/seen": float(self._seen)}

    def observe(self, experience):
        pass

    def state(self):
        import numpy as np
        return {"seen": np.array(self._seen)}

    def load_state(self, arrays):
        self._seen = int(arrays["seen"])


class WithoutConfig:
    """No algorithm."""
'''
