"""Proximal policy optimisation with the clipped objective (Schulman et al. 2017).

Order of the file: batch, loss, update. Tensors and config only; everything it does follows from its state, the
fragments and the counters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from shared.algorithm_configs.ppo import PPOConfig
from shared.policies.actor_critic import ActorCritic
from shared.spaces import Array, Columns
from shared.steps import Counters
from trainer_node.algorithms.adam import Adam
from trainer_node.algorithms.algorithm import Setting
from trainer_node.algorithms.experience import Experience, side_by_side, update_seed
from trainer_node.algorithms.gae import advantages
from trainer_node.algorithms.share import Share, Whole

_KL_SLACK = 1.5
_VALUE_CHUNK = 8192


@dataclass(frozen=True)
class Batch:
    """One update's transitions, flat: observations and actions by column, the rest `[B]`."""

    observations: dict[str, Tensor]
    actions: dict[str, Tensor]
    log_prob: Tensor
    value: Tensor
    advantage: Tensor
    target: Tensor

    def __len__(self) -> int:
        return len(self.log_prob)

    def take(self, rows: Tensor | slice) -> Batch:
        """The minibatch of these rows."""
        return Batch(
            {name: tensor[rows] for name, tensor in self.observations.items()},
            {name: tensor[rows] for name, tensor in self.actions.items()},
            self.log_prob[rows], self.value[rows], self.advantage[rows], self.target[rows],
        )  # fmt: skip


class PPO:
    """Learns one policy."""

    def __init__(self, policy: ActorCritic, config: PPOConfig, setting: Setting) -> None:
        self.policy = policy.to(setting.device)
        self._config = config
        self._device = setting.device
        self._seed = setting.seed
        self.share: Share = Whole()
        """What of each minibatch is learnt from here; the rest by the other ranks."""
        self._optimiser = Adam(self.policy.parameters(), config.adam_epsilon)

    def update(self, experience: Sequence[Experience], counters: Counters) -> dict[str, float]:
        """One update from K fragments of equal T; answers the metrics.

        The normaliser takes these observations in afterwards, so that the batch is learnt with the statistics that it
        was acted with.
        """
        config = self._config
        learning_rate, clip = config.learning_rate.value(counters), config.clip_range.value(counters)
        columns = side_by_side(experience)
        batch = self._batch(columns)
        history = self._epochs(batch, learning_rate, clip, counters.updates) if len(batch) else []
        metrics = {name: float(np.mean([item[name] for item in history])) for name in (history[0] if history else {})}
        metrics |= {
            "train/learning_rate": learning_rate,
            "train/clip_range": clip,
            "train/gradient_steps": len(history),
        }
        if len(batch):
            spread = batch.target.var()
            unexplained = (batch.target - batch.value).var() / spread if len(batch) > 1 and spread > 0 else torch.nan
            metrics["train/explained_variance"] = 1.0 - float(unexplained)
        self._normalise(columns)
        return metrics

    def observe(self, experience: Sequence[Experience]) -> None:
        """Takes the observations into the normaliser: all there is to do in heat-up."""
        self._normalise(side_by_side(experience))

    def _normalise(self, columns: Mapping[str, Array]) -> None:
        if self.policy.normaliser is not None:
            mask = torch.from_numpy(columns["mask"])
            self.policy.normaliser.update(
                {name: self._tensor(columns[name])[mask] for name in self.policy.spaces.observation.column_names("obs")}
            )

    @torch.no_grad()
    def _batch(self, columns: Mapping[str, Array]) -> Batch:
        config, spaces = self._config, self.policy.spaces
        tensors = {name: self._tensor(array) for name, array in columns.items()}
        steps, slots = columns["reward"].shape
        names = spaces.observation.column_names("obs")
        value = self._values({name: tensors[name].flatten(0, 1) for name in names}).reshape(steps, slots)
        advantage = advantages(
            reward=tensors["reward"],
            value=value,
            bootstrap_value=self._values({name: tensors["bootstrap_" + name] for name in names}),
            terminated=tensors["terminated"],
            truncated=tensors["truncated"],
            mask=tensors["mask"],
            final_index=tensors["final_index"].to(torch.int64),
            final_value=self._values({name: tensors["final_" + name] for name in names}),
            gamma=config.gamma,
            gae_lambda=config.gae_lambda,
        )
        keep = tensors["mask"].flatten()
        return Batch(
            {name: tensors[name].flatten(0, 1)[keep] for name in names},
            {name: tensors[name].flatten(0, 1)[keep] for name in spaces.action.column_names("action")},
            tensors["log_prob"].flatten()[keep], value.flatten()[keep], advantage.flatten()[keep],
            (advantage + value).flatten()[keep],
        )  # fmt: skip

    def _values(self, observations: Mapping[str, Tensor]) -> Tensor:
        rows = len(next(iter(observations.values())))
        parts = [
            self.policy.value({name: tensor[start : start + _VALUE_CHUNK] for name, tensor in observations.items()})
            for start in range(0, rows, _VALUE_CHUNK)
        ]
        return torch.cat(parts) if parts else torch.zeros(0, device=self._device)

    def _epochs(self, batch: Batch, learning_rate: float, clip: float, update: int) -> list[dict[str, float]]:
        """All gradient steps of one update; stops early when the policy has moved too far (target_kl)."""
        config = self._config
        generator = torch.Generator().manual_seed(update_seed(self._seed, update))
        minibatches = -(-len(batch) // config.minibatch_size)
        history: list[dict[str, Tensor]] = []
        norms: list[Tensor] = []
        for _ in range(config.epochs):
            order = torch.randperm(len(batch), generator=generator).to(self._device)
            for rows in order.tensor_split(minibatches):
                loss, terms = self.share.forward(self.loss, batch.take(rows), clip)
                if config.target_kl is not None:
                    divergence = float(self.share.total(terms["train/approx_kl"]))
                    if divergence > _KL_SLACK * config.target_kl:
                        return self._metrics(history or [terms], norms)
                self._optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                norms.append(nn.utils.clip_grad_norm_(self.policy.parameters(), config.max_grad_norm).detach())
                self._optimiser.step(learning_rate)
                history.append(terms)
        return self._metrics(history, norms)

    def _metrics(self, history: Sequence[Mapping[str, Tensor]], norms: Sequence[Tensor]) -> list[dict[str, float]]:
        """The terms of each gradient step over its whole minibatch, and the norm of its gradients."""
        table = self.share.total(torch.stack([torch.stack(list(terms.values())) for terms in history]))
        rows: list[dict[str, float]] = [dict(zip(history[0], values, strict=True)) for values in table.tolist()]
        for row, norm in zip(rows, norms):
            row["train/grad_norm"] = float(norm)
        return rows

    def loss(self, batch: Batch, clip: float) -> tuple[Tensor, dict[str, Tensor]]:
        """The scalar loss of a minibatch (eq. 9 of the paper, signs turned) and its terms; of them, what is our share.

        Advantages are normalised over the whole minibatch, whoever learns from which part of it.
        """
        config, mean, rows = self._config, self.share.mean, len(batch)
        advantage = batch.advantage
        if config.normalise_advantages and rows > 1:
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        batch = replace(batch, advantage=advantage).take(self.share.rows(rows))
        advantage = batch.advantage
        params, value = self.policy.action_parameters_and_value(batch.observations)
        log_ratio = self.policy.distribution.log_prob(params, batch.actions) - batch.log_prob
        ratio = log_ratio.exp()
        policy_loss = -mean(torch.min(advantage * ratio, advantage * ratio.clamp(1 - clip, 1 + clip)), rows)
        if config.clip_range_value is not None:
            bound = config.clip_range_value
            clipped = batch.value + (value - batch.value).clamp(-bound, bound)
            value_loss = mean(torch.max((value - batch.target).square(), (clipped - batch.target).square()), rows)
        else:
            value_loss = mean((value - batch.target).square(), rows)
        entropy = mean(self.policy.distribution.entropy(params), rows)
        loss = policy_loss + config.value_coefficient * value_loss - config.entropy_coefficient * entropy
        with torch.no_grad():
            metrics = {
                "train/loss": loss.detach(),
                "train/policy_loss": policy_loss.detach(),
                "train/value_loss": value_loss.detach(),
                "train/entropy": entropy.detach(),
                "train/approx_kl": mean((ratio - 1) - log_ratio, rows),
                "train/clip_fraction": mean(((ratio - 1).abs() > clip).to(torch.float32), rows),
            }
        return loss, metrics

    def _tensor(self, array: Array) -> Tensor:
        return torch.from_numpy(np.array(array)).to(self._device)

    def state(self) -> Columns:
        """The optimiser's state as named arrays."""
        return self._optimiser.state()

    def load_state(self, arrays: Mapping[str, Array]) -> None:
        """The inverse of `state`."""
        self._optimiser.load_state(arrays)
