"""Asynchronous PPO: the clipped objective with V-trace's advantages, for experience of older policies.

Values, targets and importance weights are those of a target network, which follows the policy in steps (IMPACT, Luo et
al. 2020).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from stagecoach.shared.config.algorithms.on_policy import APPOConfig
from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.policies.actor_critic import ActorCritic
from stagecoach.shared.policies.policy import copy_sharing_buffers
from stagecoach.trainer_node.learning.algorithms.ppo import Clipped
from stagecoach.trainer_node.learning.building_blocks.batch import Batch
from stagecoach.trainer_node.learning.building_blocks.interface import Experience, Setting, Terms
from stagecoach.trainer_node.learning.building_blocks.optimization import soft_update


class APPO(Clipped):
    _config: APPOConfig

    def __init__(self, policy: ActorCritic, config: APPOConfig, setting: Setting) -> None:
        super().__init__(policy, config, setting)
        self.target = copy_sharing_buffers(self.policy).requires_grad_(False)
        self.parts["target/"] = self.target

    def _begin(self, experience: Sequence[Experience], tensors: Mapping[str, Tensor], counters: Counters) -> None:
        if counters.updates % self._config.target_updates == 0:
            soft_update(self.target, self.policy, 1.0)
        super()._begin(experience, tensors, counters)

    def batch(self, tensors: Mapping[str, Tensor]) -> Batch:
        found, log_prob, trace = self._by_vtrace(tensors, self.target, self._config)
        advantage = trace.advantage
        if self._config.clip_against == "target":
            tensors, advantage = {**tensors, "log_prob": log_prob}, trace.weight * advantage
        batch = self._made(tensors, found.value, advantage, trace.target, found.params)
        return replace(batch, metrics={"train/importance_weight": float(trace.weight[tensors["mask"]].mean())})

    def _objective(self, batch: Batch, params: Tensor, value: Tensor, clip: float, rows: int) -> Terms:
        assert batch.anchor_params is not None
        found = super()._objective(batch, params, value, clip, rows)
        divergence = self.policy.distribution.divergence(batch.anchor_params, params)
        return self.pulled(found, divergence, self._config.kl_coefficient, rows, "train/kl_from_target")
