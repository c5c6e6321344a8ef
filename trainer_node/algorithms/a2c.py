"""Advantage actor-critic: A3C (Mnih et al. 2016) in lockstep.

The batch is made here; the loss and the update are policy_gradient.py's and on_policy.py's.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from shared.algorithm_configs.a2c import A2CConfig
from shared.policies.actor_critic import ActorCritic
from trainer_node.algorithms.algorithm import Setting
from trainer_node.algorithms.batch import Batch
from trainer_node.algorithms.policy_gradient import PolicyGradient


class A2C(PolicyGradient):
    """Learns one policy."""

    def __init__(self, policy: ActorCritic, config: A2CConfig, setting: Setting) -> None:
        super().__init__(policy, config, setting)
        self._gae_lambda = config.gae_lambda

    def _batch(self, tensors: Mapping[str, Tensor]) -> Batch:
        return self._by_gae(tensors, self._gae_lambda)
