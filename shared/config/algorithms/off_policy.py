"""The configurations of algorithms that have a replay buffer: SAC, TD3, DDPG, and what they share with others."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from stagecoach.shared.config.algorithms.base import AlgorithmConfig, Signals
from stagecoach.shared.config.algorithms.exploration import GaussianNoise, NoiseField, Sampling
from stagecoach.shared.config.algorithms.replay_buffer import ReplayBufferField, UniformReplay
from stagecoach.shared.config.schema.section import ScheduleField

LARGE_NETWORK: Mapping[str, Any] = {"hidden_sizes": [256, 256], "activation": "relu"}
"""Of actors and critics, as TD3's and SAC's authors, Stable-Baselines3 (SAC) and CleanRL have it."""
FEW_STEPS_AHEAD: Mapping[str, Any] = {"fragment_steps": 8, "fragments_per_update": 1, "max_policy_lag": 2}
"""Rollout of algorithms that learn while they act: workers act on during gradient steps, as replay allows."""


class OffPolicyConfig(AlgorithmConfig):
    """The fields that every algorithm with a replay buffer has."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "policies": LARGE_NETWORK,
        "heatup": {"duration": "1000 env_steps"},
        "rollout": FEW_STEPS_AHEAD,
        "checkpoint": {"every": "5000 env_steps"},
    }

    replay_buffer: ReplayBufferField = UniformReplay()
    """What is learned from: the newest transitions, drawn by `kind` uniform, prioritized, hindsight or balanced."""
    minibatch_size: int = Field(64, ge=1)
    """Transitions in one gradient step."""
    gradient_steps_per_env_step: float = Field(1.0, gt=0, le=1000)
    """Gradient steps for each env step trained on (the replay ratio), made together after each update's fragments."""
    n_step: int = Field(1, ge=1, le=1000)
    """Steps of reward before the target bootstraps; more spread rewards faster, and are less off-policy correct."""
    max_grad_norm: float | None = Field(10.0, gt=0)
    """Gradients are scaled down to this norm; null for none."""
    adam_epsilon: float = Field(1e-8, gt=0)
    """Adam's ε."""


class ActorConfig(Signals, OffPolicyConfig):
    """The fields of actors and their critics."""

    replay_buffer: ReplayBufferField = UniformReplay(capacity=1_000_000)
    """What is learned from: the newest million of transitions, as in the papers and Stable-Baselines3."""
    minibatch_size: int = Field(256, ge=1)
    max_grad_norm: float | None = Field(None, gt=0)
    tau: float = Field(0.005, gt=0, le=1)
    """How far targets go toward the networks each time they move."""
    critic_learning_rate: ScheduleField | None = None
    """Step size of the critics; `learning_rate` by default."""
    exploration: NoiseField = GaussianNoise()
    """How workers act: noise on the policy's actions, or `sampling` from the policy without any."""


class SoftConfig(ActorConfig):
    """The fields of all that rewards entropy with a temperature."""

    policy: ClassVar[str] = "actor"
    initial_temperature: float = Field(1.0, gt=0)
    """Weight of the entropy at the start (α)."""
    learn_temperature: bool = True
    """Move α such that the entropy comes to `target_entropy`; else it stays."""
    target_entropy: float | None = None
    """In nats, of actions in [-1, 1]. By default −1 for each element of the action; of a discrete one, that of
    ε-greedy acting with ε = 0.1 (0.20 for two choices): the paper's 0.98 · ln(choices) is nearly uniform acting."""
    exploration: NoiseField = Sampling()
    """How workers act: `sampling` from the policy; with any noise, that is added to what was drawn."""


class SACConfig(SoftConfig):
    """Soft actor-critic (Haarnoja et al. 2018b), for boxes with bounds; Christodoulou (2019) for one choice."""

    learner: ClassVar[str] = "stagecoach.trainer_node.learning.algorithms.sac:SAC"
    name: str = "sac"


class TD3Config(ActorConfig):
    """Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018), for boxes with bounds."""

    learner: ClassVar[str] = "stagecoach.trainer_node.learning.algorithms.td3:TD3"
    policy: ClassVar[str] = "deterministic"
    critics: ClassVar[int] = 2
    name: str = "td3"
    policy_delay: int = Field(2, ge=1)
    """The policy and the targets move at every such gradient step of the critics."""
    target_noise: float = Field(0.2, ge=0)
    """Deviation of the noise on the target policy's actions; 1 is half of each action's range."""
    target_noise_clip: float = Field(0.5, ge=0)
    """Bound of that noise."""


class DDPGConfig(ActorConfig):
    """Deep deterministic policy gradient (Lillicrap et al. 2016), for boxes with bounds. With
    `algorithm.exploration.kind: ou` it explores as the paper does."""

    learner: ClassVar[str] = "stagecoach.trainer_node.learning.algorithms.td3:TD3"
    policy: ClassVar[str] = "deterministic"
    critics: ClassVar[int] = 1
    policy_delay: ClassVar[int] = 1
    target_noise: ClassVar[float] = 0.0
    target_noise_clip: ClassVar[float] = 0.0
    name: str = "ddpg"
