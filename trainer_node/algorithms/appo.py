"""Asynchronous PPO: the clipped objective with V-trace's advantages, for experience of older policies.

Values, targets and importance weights are those of a target network, which follows the policy in steps (IMPACT, Luo et
al. 2020). Order of the file: target network, batch, loss, state; the update is clipped.py's and on_policy.py's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from shared.algorithm_configs.appo import APPOConfig
from shared.policies.actor_critic import ActorCritic
from shared.policies.codec import load_state_arrays, state_arrays
from shared.spaces import Array, Columns
from shared.steps import Counters
from trainer_node.algorithms.algorithm import Setting
from trainer_node.algorithms.batch import Batch
from trainer_node.algorithms.clipped import Clipped

_TARGET = "target/"


@dataclass(frozen=True, kw_only=True)
class _AnchoredBatch(Batch):
    """`log_prob` is what the ratio is taken against."""

    target_params: Tensor
    """`[B, P]`, the outputs of the target network."""


class APPO(Clipped):
    """Learns one policy."""

    def __init__(self, policy: ActorCritic, config: APPOConfig, setting: Setting) -> None:
        super().__init__(policy, config, setting)
        self._config = config
        self._target = copy.deepcopy(self.policy).requires_grad_(False)

    def _begin(self, counters: Counters) -> None:
        """The target network becomes the policy, observation statistics included, when it is due."""
        if counters.updates % self._config.target_updates == 0:
            self._target.load_state_dict(self.policy.state_dict())

    def _batch(self, tensors: Mapping[str, Tensor]) -> Batch:
        params, value, trace = self._by_vtrace(tensors, self._target, self._config)
        weight, mask = trace.weight, tensors["mask"]
        of_target = self._config.clip_against == "target"
        batch = self._flat(tensors, value, weight * trace.advantage if of_target else trace.advantage, trace.target)
        kept = params[mask.flatten()]
        anchor = self._target.distribution.log_prob(kept, batch.actions) if of_target else batch.log_prob
        return _AnchoredBatch(
            **vars(replace(batch, log_prob=anchor, figures={"train/importance_weight": float(weight[mask].mean())})),
            target_params=kept,
        )

    def _objective(
        self, batch: Batch, params: Tensor, value: Tensor, clip: float, rows: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(batch, _AnchoredBatch)
        loss, terms = super()._objective(batch, params, value, clip, rows)
        divergence = self.share.mean(self.policy.distribution.divergence(batch.target_params, params), rows)
        if self._config.kl_coefficient:
            loss = loss + self._config.kl_coefficient * divergence
        return loss, terms | {"train/loss": loss.detach(), "train/kl_from_target": divergence.detach()}

    def state(self) -> Columns:
        """The optimiser's state, and the target network under `target/`."""
        return super().state() | {_TARGET + name: array for name, array in state_arrays(self._target).items()}

    def load_state(self, arrays: Mapping[str, Array]) -> None:
        """The inverse of `state`."""
        target = {name.removeprefix(_TARGET): array for name, array in arrays.items() if name.startswith(_TARGET)}
        super().load_state({name: array for name, array in arrays.items() if not name.startswith(_TARGET)})
        load_state_arrays(self._target, target)
