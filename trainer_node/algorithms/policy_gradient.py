"""The plain objective: the gradient of advantage × log-probability, in one step for each update (A2C, IMPALA)."""

from __future__ import annotations

from torch import Tensor

from shared.algorithm_configs.a2c import A2CConfig
from shared.algorithm_configs.impala import IMPALAConfig
from shared.policies.actor_critic import ActorCritic
from shared.steps import Counters
from trainer_node.algorithms.algorithm import Setting
from trainer_node.algorithms.batch import Batch
from trainer_node.algorithms.compiling import compiled
from trainer_node.algorithms.descent import figures
from trainer_node.algorithms.on_policy import OnPolicy


class PolicyGradient(OnPolicy):
    """Learns one policy, all of a batch at once."""

    def __init__(self, policy: ActorCritic, config: A2CConfig | IMPALAConfig, setting: Setting) -> None:
        super().__init__(policy, config, setting)
        self._normalises = config.normalise_advantages
        self._loss = compiled(self.loss, setting, {setting.transitions})

    def _learn(self, batch: Batch, counters: Counters) -> list[dict[str, float]]:
        loss, terms = self._forward(self._loss, batch)
        norm = self._descend(loss, self._shared.learning_rate.value(counters))
        return figures(self.share, [terms], {"train/grad_norm": [norm]})

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The scalar loss of a batch, −A log π, value and entropy, and its terms; of them, what is our share."""
        mean, rows = self.share.mean, len(batch.counted(batch.log_prob))
        whole = batch.normalised() if self._normalises else batch
        part = whole.take(self.share.rows(len(whole)))
        params, value = part.outputs(self.policy)
        batch = part.flat()
        log_prob, entropy = self.policy.distribution.log_prob_and_entropy(params, batch.actions)
        return self._total_loss(
            -mean(batch.advantage * log_prob, rows),
            mean((value - batch.target).square(), rows),
            mean(entropy, rows),
        )
