"""Truncated quantile critics (Kuznetsov et al. 2020): SAC whose critics predict quantiles of the soft return, the
largest of which are left out of the target, against overestimation."""

from collections.abc import Mapping

import torch
from torch import Tensor

from stagecoach.shared.base.errors import UnsupportedSpace
from stagecoach.shared.config.algorithms.off_policy import TQCConfig
from stagecoach.shared.policies.continuous import Actor, SquashedGaussian
from stagecoach.trainer_node.learning.algorithms.dqn import quantile_huber
from stagecoach.trainer_node.learning.algorithms.off_policy import Minibatch
from stagecoach.trainer_node.learning.algorithms.sac import SAC, Drawn
from stagecoach.trainer_node.learning.building_blocks.critics import Critics


class MeanOfQuantiles(Drawn):
    """An action's value is the mean of all quantiles: none is left out for the policy (eq. 12)."""

    def combined(self, values: Tensor) -> Tensor:
        return values.mean(dim=(0, 2)).unsqueeze(1)

    def value(self, critics: Critics, observations: Mapping[str, Tensor], actions: Mapping[str, Tensor]) -> Tensor:
        quantiles: Tensor = critics(observations, self._policy.normalizer, self._policy.bounds.flat(actions))
        return quantiles


class TQC(SAC):
    _config: TQCConfig
    actions: MeanOfQuantiles

    @staticmethod
    def considered(policy: Actor, config: TQCConfig) -> MeanOfQuantiles:
        if not isinstance(policy.distribution, SquashedGaussian):
            raise UnsupportedSpace("tqc learns boxes with bounds; of one discrete choice, dqn with head: qr or sac do")
        actions = MeanOfQuantiles(policy, policy.distribution)
        actions.shape |= {"count": config.critics, "outputs": config.quantiles}
        return actions

    def targets_of(self, batch: Minibatch, noise: Tensor) -> Tensor:
        """Returns `[B, T]`, eq. 8 to 10: r + γ (z' − α ln π) for the T smallest of all critics' quantiles z'."""
        with torch.no_grad():
            params = self.policy.action_parameters(batch.next_observations)
            action, log_prob = self.actions.distribution.reparameterized(params, noise)
            quantiles: Tensor = self.targets(batch.next_observations, self.policy.normalizer, action)
            count = len(quantiles) * (self._config.quantiles - self._config.dropped_quantiles)
            smallest = quantiles.transpose(0, 1).flatten(1).sort(dim=1).values[:, :count]
            soft = smallest - self.log_temperature.exp() * log_prob.unsqueeze(1)
            return batch.reward.unsqueeze(1) + batch.discount.unsqueeze(1) * soft

    def critic_loss(self, batch: Minibatch, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns eq. 7, the weighted quantile loss summed over critics; values and errors, `[C, B]`, of the means."""
        quantiles = self.actions.value(self.critics, batch.observations, batch.actions)
        target = self.targets_of(batch, noise)
        count, rows, width = quantiles.shape
        losses = quantile_huber(quantiles.flatten(0, 1), target.repeat(count, 1)).reshape(count, rows) / width
        values = quantiles.mean(dim=2)
        return (batch.weight * losses).mean(dim=1).sum(), values, values - target.mean(dim=1)
