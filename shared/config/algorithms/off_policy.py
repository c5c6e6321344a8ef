"""Sections of SAC, TD3 and DDPG, and the fields that all algorithms with a replay buffer share."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from stagecoach.shared.config.algorithms.base import AlgorithmConfig, Signals
from stagecoach.shared.config.algorithms.exploration import GaussianNoise, NoiseField, Sampling
from stagecoach.shared.config.algorithms.replay_buffer import MemorySection, ReplayBufferField, UniformReplay
from stagecoach.shared.config.schema.section import ScheduleField

LARGE_NETWORK: Mapping[str, Any] = {"hidden_sizes": [256, 256], "activation": "relu"}
"""Network of actors and critics in TD3's and SAC's papers, Stable-Baselines3 (SAC) and CleanRL."""
FEW_STEPS_AHEAD: Mapping[str, Any] = {"fragment_steps": 8, "fragments_per_update": 1, "max_policy_lag": 2}
"""Rollout defaults of algorithms that act during gradient steps."""


class OffPolicyConfig(AlgorithmConfig):
    """Fields of every algorithm with a replay buffer."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "policies": LARGE_NETWORK,
        "heatup": {"duration": "1000 env_steps"},
        "rollout": FEW_STEPS_AHEAD,
        "checkpoint": {"every": "5000 env_steps"},
    }

    replay_buffer: ReplayBufferField = UniformReplay()
    """Replay buffer of the newest transitions; `kind` is uniform, prioritized, hindsight or balanced."""
    minibatch_size: int = Field(64, ge=1)
    """Transitions in one gradient step."""
    gradient_steps_per_env_step: float = Field(1.0, gt=0, le=1000)
    """Gradient steps per env step (the replay ratio), computed together after each update's fragments."""
    n_step: int = Field(1, ge=1, le=1000)
    """Steps of reward before the target bootstraps. More steps spread rewards faster but are less off-policy
    correct."""
    max_grad_norm: float | None = Field(10.0, gt=0)
    """Maximum norm of the gradients; null for none."""
    adam_epsilon: float = Field(1e-8, gt=0)
    """Adam's ε."""

    @property
    def replay(self) -> MemorySection:
        return self.replay_buffer


class ActorConfig(Signals, OffPolicyConfig):
    """Fields of algorithms with an actor and critics."""

    replay_buffer: ReplayBufferField = UniformReplay(capacity=1_000_000)
    """Replay buffer of the newest million transitions, as in the papers and Stable-Baselines3."""
    minibatch_size: int = Field(256, ge=1)
    max_grad_norm: float | None = Field(None, gt=0)
    tau: float = Field(0.005, gt=0, le=1)
    """Interpolation factor of each target update (Polyak averaging)."""
    critic_learning_rate: ScheduleField | None = None
    """Adam's step size for the critics; `learning_rate` by default."""
    exploration: NoiseField = GaussianNoise()
    """Exploration: noise on the policy's actions, or `sampling` without noise."""


class SoftConfig(ActorConfig):
    """Fields of algorithms with an entropy bonus."""

    policy: ClassVar[str] = "actor"
    initial_temperature: float = Field(1.0, gt=0)
    """Initial weight of the entropy (α)."""
    learn_temperature: bool = True
    """Learns α so that the entropy reaches `target_entropy`; otherwise α is constant."""
    target_entropy: float | None = None
    """Target in nats, for actions in [-1, 1]. The default is −1 per element of a continuous action. For a discrete
    action it is the entropy of ε-greedy acting with ε = 0.1 (0.20 for two choices): the paper's 0.98 · ln(choices) is
    nearly uniform."""
    exploration: NoiseField = Sampling()
    """Exploration: `sampling` from the policy; any noise is added to the sampled action."""


class SACConfig(SoftConfig):
    """Soft actor-critic (Haarnoja et al. 2018b), for boxes with bounds; Christodoulou (2019) for one choice."""

    learner: ClassVar[str] = "stagecoach.trainer_node.learning.algorithms.sac:SAC"
    name: str = "sac"


class TQCConfig(SoftConfig):
    """Truncated quantile critics (Kuznetsov et al. 2020), for boxes with bounds."""

    learner: ClassVar[str] = "stagecoach.trainer_node.learning.algorithms.tqc:TQC"
    name: str = "tqc"
    critics: int = Field(2, ge=1, le=100)
    """Number of critics; 5 in the paper, 2 in sb3-contrib."""
    quantiles: int = Field(25, ge=1)
    """Quantiles of each critic."""
    dropped_quantiles: int = Field(2, ge=0)
    """Quantiles that the target leaves out, for each critic: the largest of all. More correct more overestimation."""

    @model_validator(mode="after")
    def _keeps_some(self) -> Self:
        if self.dropped_quantiles >= self.quantiles:
            raise ValueError(
                f"dropped_quantiles={self.dropped_quantiles} leaves none of quantiles={self.quantiles}; make it smaller"
            )
        return self


class TD3Config(ActorConfig):
    """Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018), for boxes with bounds."""

    learner: ClassVar[str] = "stagecoach.trainer_node.learning.algorithms.td3:TD3"
    policy: ClassVar[str] = "deterministic"
    critics: ClassVar[int] = 2
    name: str = "td3"
    policy_delay: int = Field(2, ge=1)
    """Gradient steps of the critics per step of policy and targets."""
    target_noise: float = Field(0.2, ge=0)
    """Standard deviation of the noise on the target policy's actions; 1 is half of each action's range."""
    target_noise_clip: float = Field(0.5, ge=0)
    """Bound of the target noise."""


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
