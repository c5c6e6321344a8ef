"""What the configurations of all off-policy algorithms have: a replay memory, and how much is learnt from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from shared.algorithm_configs.section import AlgorithmConfig
from shared.memory_config import MemoryField, UniformMemory

if TYPE_CHECKING:
    from shared.config import Config


LARGE_NETWORK: Mapping[str, Any] = {"hidden_sizes": [256, 256], "activation": "relu"}
"""Of actors and critics, as TD3's and SAC's authors, Stable-Baselines3 (SAC) and CleanRL have it."""
FEW_STEPS_AHEAD: Mapping[str, Any] = {"fragment_steps": 8, "fragments_per_update": 1, "max_policy_lag": 2}
"""Rollout of algorithms that learn while they act: little is acted by one version, and acting goes on during gradient
steps, since a replay memory bears what an older version acted."""


class OffPolicyConfig(AlgorithmConfig):
    """The fields that every algorithm with a replay memory has."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "policies": LARGE_NETWORK,
        "heatup": "1000 env_steps",
        "rollout": FEW_STEPS_AHEAD,
        "checkpoint": {"every": "5000 env_steps"},
    }

    memory: MemoryField = UniformMemory()
    """What is learnt from: the newest transitions, drawn by `kind` uniform, prioritised, hindsight or balanced."""
    minibatch_size: int = Field(64, ge=1)
    """Transitions in one gradient step."""
    gradient_steps_per_env_step: float = Field(1.0, gt=0, le=1000)
    """Gradient steps for each env step trained on (the replay ratio). They are made in one go after each update's
    fragments, as many as are due by then."""
    n_step: int = Field(1, ge=1, le=1000)
    """Steps of reward before the target bootstraps; more spread rewards faster, and are less off-policy correct."""
    max_grad_norm: float | None = Field(10.0, gt=0)
    """Gradients are scaled down to this norm; null for none."""
    adam_epsilon: float = Field(1e-8, gt=0)
    """Adam's ε."""

    def refuse(self, run: Config) -> None:
        """Raises `ValueError` where the memory cannot hold what an update brings or a minibatch asks for."""
        capacity, update = self.memory.capacity, run.transitions_per_update
        if capacity < self.minibatch_size:
            raise ValueError(
                f"algorithm.minibatch_size={self.minibatch_size} is more than the memory holds "
                f"(algorithm.memory.capacity={capacity}); lower the first or raise the second"
            )
        if capacity < update:
            rollout = run.rollout
            raise ValueError(
                f"algorithm.memory.capacity={capacity} is less than the {update} transitions that each update brings "
                f"(rollout.fragments_per_update={rollout.fragments_per_update} × rollout.fragment_steps="
                f"{rollout.fragment_steps} × environment.num_envs={run.environment.num_envs}), so that some would "
                f"never be learnt from; raise the first or lower one of the others"
            )
        changed = [name for name, policy in run.policies.items() if policy.changes_rewards]
        if self.memory.kind == "hindsight" and changed:
            raise ValueError(
                f"algorithm.memory.kind=hindsight gives rewards of its own to the goals it puts in, and "
                f"policies.{changed[0]} changes those of the environment (reward_scale, reward_clip or transform), so "
                f"that the two would not fit together; use one of the two"
            )
        if run.trainer.ranks > 1:
            raise ValueError(
                f"trainer.ranks={run.trainer.ranks}: {self.name} learns in one process, since each rank would need "
                f"the whole memory; set trainer.ranks=1"
            )
