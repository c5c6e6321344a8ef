"""What the configurations of all algorithms have whose policy is an actor alone, with critics of the trainer's."""

from __future__ import annotations

from pydantic import Field

from shared.algorithm_configs.cloning import Cloning
from shared.algorithm_configs.off_policy import OffPolicyConfig
from shared.exploration_config import ExplorationConfig, GaussianNoise, NoiseField
from shared.memory_config import MemoryField, UniformMemory
from shared.schedules import ScheduleField


class ActorConfig(Cloning, OffPolicyConfig):
    """The fields of actors and their critics."""

    memory: MemoryField = UniformMemory(capacity=1_000_000)
    """What is learnt from: the newest million of transitions, as in the papers and Stable-Baselines3."""
    minibatch_size: int = Field(256, ge=1)
    """Transitions in one gradient step."""
    max_grad_norm: float | None = Field(None, gt=0)
    """Gradients are scaled down to this norm; null for none, as in the paper."""
    tau: float = Field(0.005, gt=0, le=1)
    """How far targets go towards the networks each time they move."""
    critic_learning_rate: ScheduleField | None = None
    """Step size of the critics; `learning_rate` by default."""
    exploration: NoiseField = GaussianNoise()
    """How workers act: noise on the policy's actions, or `sampling` from the policy without any."""

    @property
    def acting(self) -> ExplorationConfig:
        """As `exploration` says."""
        return self.exploration
