"""Proximal policy optimization with the clipped objective (Schulman et al. 2017)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stagecoach.shared.config.algorithms.on_policy import ClippedConfig, PPOConfig
from stagecoach.shared.config.schema.section import Schedule
from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.policies.actor_critic import ActorCritic
from stagecoach.shared.policies.policy import copy_sharing_buffers
from stagecoach.trainer_node.learning.algorithms.on_policy import OnPolicy
from stagecoach.trainer_node.learning.building_blocks.batch import Batch, forward_pass, log_probs
from stagecoach.trainer_node.learning.building_blocks.interface import Experience, Setting, Terms
from stagecoach.trainer_node.learning.building_blocks.optimization import soft_update

_LARGEST_LOG_RATIO = 20.0
"""A step that has become e^20 times as likely is far beyond any clip; float32 has no e^89."""
_KL_SLACK = 1.5


class Clipped(OnPolicy):
    """The clipped objective (eq. 7 and 9), in epochs of minibatches for each update; PPO's and APPO's."""

    _config: ClippedConfig

    def _schedules(self, counters: Counters) -> dict[str, float]:
        return super()._schedules(counters) | {"train/clip_range": self._config.clip_range.value(counters)}

    def _loss_arguments(self, counters: Counters) -> tuple[Any, ...]:
        return (self._config.clip_range.value(counters),)

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
        """Returns the scalar loss of a minibatch (eq. 9, signs turned) and its terms, this rank's part of each."""
        batch, params, value, rows = self._evaluated(batch, normalize=self._config.normalize_advantages)
        return self._objective(batch, params, value, clip, rows)

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

    def pulled(self, found: Terms, divergence: Tensor, coefficient: float, rows: int, name: str) -> Terms:
        """Adds the weighted mean of a divergence `[B]` from another network to a loss, and its mean to the terms."""
        (loss, terms), mean = found, self.shard.mean(divergence, rows)
        if coefficient:
            loss = loss + coefficient * mean
        return loss, terms | {"train/loss": loss.detach(), name: mean.detach()}


class PPO(Clipped):
    """`magnet_coefficient` keeps the policy near a slow copy of it, its magnet: magnetic mirror descent, whose last
    policy nears an equilibrium of a two-player zero-sum game, and not only the mean of all (Sokota et al. 2023)."""

    _config: PPOConfig

    def __init__(self, policy: ActorCritic, config: PPOConfig, setting: Setting) -> None:
        super().__init__(policy, config, setting)
        self._magnet_coefficient, self.magnet = config.magnet_coefficient.start, None
        if config.magnet_coefficient != Schedule(start=0.0):
            self.magnet = copy_sharing_buffers(self.policy).requires_grad_(False)
            self.parts["magnet/"] = self.magnet

    def _begin(self, experience: Sequence[Experience], tensors: Mapping[str, Tensor], counters: Counters) -> None:
        super()._begin(experience, tensors, counters)
        self._magnet_coefficient = self._config.magnet_coefficient.value(counters)

    def _anchor_params(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        return None if self.magnet is None else forward_pass(self.magnet, tensors, with_params=True).params

    def _objective(self, batch: Batch, params: Tensor, value: Tensor, clip: float, rows: int) -> Terms:
        found = super()._objective(batch, params, value, clip, rows)
        if batch.anchor_params is None:
            return found
        divergence = self.policy.distribution.divergence(params, batch.anchor_params)
        return self.pulled(found, divergence, self._magnet_coefficient, rows, "train/kl_from_magnet")

    def _end(self, batch: Batch, counters: Counters) -> dict[str, float]:
        if self.magnet is not None:
            soft_update(self.magnet, self.policy, self._config.magnet_rate)
        return super()._end(batch, counters)
