"""Asynchronous PPO: the clipped objective with V-trace's advantages, for experience of older policies.

Values, targets and importance weights are those of a target network, which follows the policy in steps (IMPACT, Luo et
al. 2020). Order of the file: target network, batch, loss, state; the update is clipped.py's and on_policy.py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from shared.algorithm_configs.appo import APPOConfig
from shared.policies.actor_critic import ActorCritic
from shared.policies.policy import copy_sharing_buffers
from shared.spaces import Array, Columns
from shared.steps import Counters
from trainer_node.algorithms.algorithm import Setting
from trainer_node.algorithms.batch import Batch
from trainer_node.algorithms.clipped import Clipped
from trainer_node.algorithms.descent import follow
from trainer_node.algorithms.named_arrays import load_network_state, network_state

_TARGET = "target/"


class APPO(Clipped):
    """Learns one policy."""

    def __init__(self, policy: ActorCritic, config: APPOConfig, setting: Setting) -> None:
        super().__init__(policy, config, setting)
        self._config = config
        self._target = copy_sharing_buffers(self.policy).requires_grad_(False)

    def _begin(self, counters: Counters) -> None:
        """The target network becomes the policy when it is due."""
        if counters.updates % self._config.target_updates == 0:
            follow(self._target, self.policy, 1.0)

    def _batch(self, tensors: Mapping[str, Tensor]) -> Batch:
        found, log_prob, trace = self._by_vtrace(tensors, self._target, self._config)
        weight, advantage = trace.weight, trace.advantage
        if self._config.clip_against == "target":
            tensors, advantage = {**tensors, "log_prob": log_prob}, weight * advantage
        batch = self._made(tensors, found.value, advantage, trace.target, found.params)
        return replace(batch, figures={"train/importance_weight": float(weight[tensors["mask"]].mean())})

    def _objective(
        self, batch: Batch, params: Tensor, value: Tensor, clip: float, rows: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.anchor_params is not None
        loss, terms = super()._objective(batch, params, value, clip, rows)
        divergence = self.share.mean(self.policy.distribution.divergence(batch.anchor_params, params), rows)
        if self._config.kl_coefficient:
            loss = loss + self._config.kl_coefficient * divergence
        return loss, terms | {"train/loss": loss.detach(), "train/kl_from_target": divergence.detach()}

    def state(self) -> Columns:
        """The optimiser's state, and the target network under `target/`."""
        return super().state() | network_state(self._target, _TARGET)

    def load_state(self, arrays: Mapping[str, Array]) -> None:
        """The inverse of `state`."""
        super().load_state({name: array for name, array in arrays.items() if not name.startswith(_TARGET)})
        load_network_state(self._target, _TARGET, arrays)
