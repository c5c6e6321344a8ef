"""The policy gradient, one step for each update: A2C, which is A3C (Mnih et al. 2016) in lockstep, and IMPALA.

IMPALA (Espeholt et al. 2018) uses V-trace targets, for experience of older policies.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from stagecoach.shared.config.algorithms.on_policy import A2CConfig, IMPALAConfig
from stagecoach.shared.experience.counters import Counters
from stagecoach.trainer_node.learning.algorithms.on_policy import OnPolicy
from stagecoach.trainer_node.learning.building_blocks.batch import Batch
from stagecoach.trainer_node.learning.building_blocks.interface import Terms


class A2C(OnPolicy):
    _config: A2CConfig | IMPALAConfig

    def _learn(self, batch: Batch, counters: Counters) -> list[dict[str, float]]:
        loss, terms = self._forward(batch)
        return self._rows([terms], [self._gradient_step(loss, self._config.learning_rate.value(counters))])

    def loss(self, batch: Batch) -> Terms:
        """Returns the scalar loss of a batch (−A log π, value, entropy) and its terms, this rank's part of each."""
        batch, params, value, rows = self._evaluated(batch, normalize=self._config.normalize_advantages)
        mean = self.shard.mean
        log_prob, entropy = self.policy.distribution.log_prob_and_entropy(params, batch.actions)
        policy_loss = -mean(batch.advantage * log_prob, rows)
        return self._total_loss(policy_loss, mean((value - batch.target).square(), rows), mean(entropy, rows))


class IMPALA(A2C):
    _config: IMPALAConfig

    def batch(self, tensors: Mapping[str, Tensor]) -> Batch:
        found, _, trace = self._by_vtrace(tensors, self.policy, self._config)
        batch = self._made(tensors, found.value, trace.weight * trace.advantage, trace.target, None)
        return replace(batch, metrics={"train/importance_weight": float(trace.weight[tensors["mask"]].mean())})
