"""Proximal policy optimization with the clipped objective (Schulman et al. 2017)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from stagecoach.shared.config.algorithms.on_policy import ClippedConfig, PPOConfig
from stagecoach.shared.experience.counters import Counters
from stagecoach.trainer_node.learning.algorithms.on_policy import OnPolicy
from stagecoach.trainer_node.learning.building_blocks.batch import Batch, forward_pass, log_probs
from stagecoach.trainer_node.learning.building_blocks.interface import Terms

_LARGEST_LOG_RATIO = 20.0
"""A step that has become e^20 times as likely is far beyond any clip; float32 has no e^89."""
_KL_SLACK = 1.5


class Clipped(OnPolicy):
    """The clipped objective (eq. 7 and 9), in epochs of minibatches for each update; PPO's and APPO's."""

    _config: ClippedConfig

    def _schedules(self, counters: Counters) -> dict[str, float]:
        return super()._schedules(counters) | {"train/clip_range": self._config.clip_range.value(counters)}

    def _learn(self, batch: Batch, counters: Counters) -> list[dict[str, float]]:
        return self._epochs(batch, counters, self._config.clip_range.value(counters))

    def _stops(self, terms: Mapping[str, Tensor]) -> bool:
        """Ends the epochs once the policy has moved by more than `target_kl`."""
        bound = self._config.target_kl
        return bound is not None and float(self.shard.total(terms["train/update_kl"])) > _KL_SLACK * bound

    def _start_log_prob(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """Returns the reference of `target_kl`: the policy now, as the acting one may be older."""
        if self._config.target_kl is None:
            return None
        return log_probs(self.policy, tensors, forward_pass(self.policy, tensors, with_params=True).params)

    def loss(self, batch: Batch, clip: float) -> Terms:
        """Returns the scalar loss of a minibatch (eq. 9, signs turned) and its terms, this rank's part of each.

        Advantages are normalized over the whole minibatch of all ranks.
        """
        rows = len(batch.counted(batch.log_prob))
        if self._config.normalize_advantages:
            batch = batch.normalized()
        batch = batch.take(self.shard.rows(len(batch)))
        params, value = batch.outputs(self.policy)
        return self._objective(batch.flat(), params, value, clip, rows)

    def surrogate(self, ratio: Tensor, advantage: Tensor, clip: float) -> Tensor:
        """Returns the objective of each step `[B]`, to be maximized (eq. 7).

        Args:
            ratio: probability of the action now, divided by that when it was taken.
            advantage: of the action, normalized if the config says so.
            clip: current value of `clip_range`.
        """
        return torch.min(advantage * ratio, advantage * ratio.clamp(1 - clip, 1 + clip))

    def _objective(self, batch: Batch, params: Tensor, value: Tensor, clip: float, rows: int) -> Terms:
        """Returns the loss of this rank's part of a minibatch of `rows`, from the policy's outputs for it."""
        mean, advantage = self.shard.mean, batch.advantage
        log_prob, entropy = self.policy.distribution.log_prob_and_entropy(params, batch.actions)
        log_ratio = (log_prob - batch.log_prob).clamp_max(_LARGEST_LOG_RATIO)
        ratio = log_ratio.exp()
        surrogate = self.surrogate(ratio, advantage, clip)
        errors = (value - batch.target).square()
        if (bound := self._config.clip_range_value) is not None:
            clipped = batch.value + (value - batch.value).clamp(-bound, bound)
            errors = torch.max(errors, (clipped - batch.target).square())
        loss, terms = self._total_loss(-mean(surrogate, rows), mean(errors, rows), mean(entropy, rows))
        with torch.no_grad():
            terms["train/approx_kl"] = mean((ratio - 1) - log_ratio, rows)
            if batch.start_log_prob is not None:
                moved = log_prob - batch.start_log_prob
                terms["train/update_kl"] = mean((moved.exp() - 1) - moved, rows)
            terms["train/clip_fraction"] = mean(((ratio - 1).abs() > clip).to(torch.float32), rows)
        return loss, terms


class PPO(Clipped):
    _config: PPOConfig
