"""The clipped objective (Schulman et al. 2017, eq. 7 and 9), in epochs of minibatches for each update (PPO, APPO)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shared.algorithm_configs.on_policy import ClippedConfig
from shared.policies.actor_critic import ActorCritic
from shared.steps import Counters
from trainer_node.algorithms.algorithm import Setting
from trainer_node.algorithms.batch import Batch
from trainer_node.algorithms.compiling import compiled, equal_parts
from trainer_node.algorithms.descent import figures
from trainer_node.algorithms.experience import update_seed
from trainer_node.algorithms.on_policy import OnPolicy
from trainer_node.algorithms.outputs import log_probs, outputs

_LARGEST_LOG_RATIO = 20.0
"""A step that has become e^20 times as likely is far beyond any clip; float32 has no e^89."""
_KL_SLACK = 1.5


class Clipped(OnPolicy):
    """Learns one policy."""

    def __init__(self, policy: ActorCritic, config: ClippedConfig, setting: Setting) -> None:
        super().__init__(policy, config, setting)
        self._clipped = config
        self._loss = compiled(self.loss, setting, equal_parts(setting.transitions, config.minibatch_size))

    def _schedules(self, counters: Counters) -> dict[str, float]:
        return super()._schedules(counters) | {"train/clip_range": self._clipped.clip_range.value(counters)}

    def _learn(self, batch: Batch, counters: Counters) -> list[dict[str, float]]:
        """Stops early when the policy has moved too far (target_kl)."""
        config = self._clipped
        learning_rate, clip = config.learning_rate.value(counters), config.clip_range.value(counters)
        generator = torch.Generator().manual_seed(update_seed(self._seed, counters.updates))
        minibatches = batch.minibatches(config.minibatch_size)
        history: list[dict[str, Tensor]] = []
        norms: list[Tensor] = []
        for _ in range(config.epochs):
            order = torch.randperm(len(batch), generator=generator).to(self._device)
            for minibatch in batch.shuffled(order, minibatches):
                loss, terms = self._forward(self._loss, minibatch, clip)
                if config.target_kl is not None:
                    divergence = float(self.share.total(terms["train/update_kl"]))
                    if divergence > _KL_SLACK * config.target_kl:
                        return figures(self.share, history or [terms], {"train/grad_norm": norms})
                norms.append(self._descend(loss, learning_rate))
                history.append(terms)
        return figures(self.share, history, {"train/grad_norm": norms})

    def _start_log_prob(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """What `target_kl` is measured against; the policy that acted may be older (`rollout.max_policy_lag`)."""
        if self._clipped.target_kl is None:
            return None
        found = outputs(self.policy, tensors, with_params=True)
        assert found.params is not None
        return log_probs(self.policy, tensors, found.params)

    def loss(self, batch: Batch, clip: float) -> tuple[Tensor, dict[str, Tensor]]:
        """The scalar loss of a minibatch (eq. 9 of the paper, signs turned) and its terms; of them, what is our share.

        Advantages are normalised over the whole minibatch, whoever learns from which part of it.
        """
        rows = len(batch.counted(batch.log_prob))
        if self._clipped.normalise_advantages:
            batch = batch.normalised()
        batch = batch.take(self.share.rows(len(batch)))
        params, value = batch.outputs(self.policy)
        return self._objective(batch.flat(), params, value, clip, rows)

    def _objective(
        self, batch: Batch, params: Tensor, value: Tensor, clip: float, rows: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Of our part of a minibatch of `rows`, where the policy's outputs are `params` and `value`."""
        mean, advantage = self.share.mean, batch.advantage
        log_prob, entropy = self.policy.distribution.log_prob_and_entropy(params, batch.actions)
        log_ratio = (log_prob - batch.log_prob).clamp_max(_LARGEST_LOG_RATIO)
        ratio = log_ratio.exp()
        surrogate = torch.min(advantage * ratio, advantage * ratio.clamp(1 - clip, 1 + clip))
        loss, terms = self._total_loss(
            -mean(surrogate, rows),
            mean(self._value_errors(batch, value), rows),
            mean(entropy, rows),
        )
        with torch.no_grad():
            terms["train/approx_kl"] = mean((ratio - 1) - log_ratio, rows)
            if batch.start_log_prob is not None:
                moved = log_prob - batch.start_log_prob
                terms["train/update_kl"] = mean((moved.exp() - 1) - moved, rows)
            terms["train/clip_fraction"] = mean(((ratio - 1).abs() > clip).to(torch.float32), rows)
        return loss, terms

    def _value_errors(self, batch: Batch, value: Tensor) -> Tensor:
        errors = (value - batch.target).square()
        if self._clipped.clip_range_value is None:
            return errors
        bound = self._clipped.clip_range_value
        clipped = batch.value + (value - batch.value).clamp(-bound, bound)
        return torch.max(errors, (clipped - batch.target).square())
