"""IMPALA (Espeholt et al. 2018): the policy gradient with V-trace's targets, for experience of older policies.

The batch is made here; the loss and the update are policy_gradient.py's and on_policy.py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from shared.algorithm_configs.impala import IMPALAConfig
from shared.policies.actor_critic import ActorCritic
from trainer_node.algorithms.algorithm import Setting
from trainer_node.algorithms.batch import Batch
from trainer_node.algorithms.policy_gradient import PolicyGradient


class IMPALA(PolicyGradient):
    """Learns one policy."""

    def __init__(self, policy: ActorCritic, config: IMPALAConfig, setting: Setting) -> None:
        super().__init__(policy, config, setting)
        self._config = config

    def _batch(self, tensors: Mapping[str, Tensor]) -> Batch:
        found, _, trace = self._by_vtrace(tensors, self.policy, self._config)
        batch = self._made(tensors, found.value, trace.weight * trace.advantage, trace.target)
        weight = trace.weight[tensors["mask"]]
        return replace(batch, figures={"train/importance_weight": float(weight.mean())})
