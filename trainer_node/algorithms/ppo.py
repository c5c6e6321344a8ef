"""Proximal policy optimisation with the clipped objective (Schulman et al. 2017).

The batch is made here; the loss and the update are clipped.py's and on_policy.py's.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from shared.algorithm_configs.ppo import PPOConfig
from shared.policies.actor_critic import ActorCritic
from trainer_node.algorithms.algorithm import Setting
from trainer_node.algorithms.batch import Batch
from trainer_node.algorithms.clipped import Clipped


class PPO(Clipped):
    """Learns one policy."""

    def __init__(self, policy: ActorCritic, config: PPOConfig, setting: Setting) -> None:
        super().__init__(policy, config, setting)
        self._gae_lambda = config.gae_lambda

    def _batch(self, tensors: Mapping[str, Tensor]) -> Batch:
        return self._by_gae(tensors, self._gae_lambda)
