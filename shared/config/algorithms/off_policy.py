"""The configurations of replay buffers, of algorithms that have one, and of SAC, TD3 and DDPG."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field

from shared.config.algorithms.base import AlgorithmConfig, Cloning, GaussianNoise, NoiseField, Sampling
from shared.config.section import Schedule, ScheduleField, Section
from shared.experience.counters import Counters


class MemorySection(Section):
    """The fields that every memory has."""

    capacity: int = Field(100_000, ge=1)
    """Transitions that stay, the newest ones, rounded up to whole fragments (with several agents of one policy, an env
    step is as many). 100 000 is enough for classic control; a million is usual for images: of 84×84 gray ones 7 GB,
    stacked or not (of stacked ones each frame is stored once, if `rollout.fragment_steps` is at least their number)."""

    def importance(self, counters: Counters) -> float:
        """β of the importance weights (`sample(beta=…)`); without priorities it counts for nothing."""
        return 1.0


class UniformReplay(MemorySection):
    """Every transition is as probable as any other."""

    kind: Literal["uniform"] = "uniform"


class PrioritizedReplay(MemorySection):
    """Transitions that were predicted badly are drawn more often (Schaul et al. 2016, proportional)."""

    kind: Literal["prioritized"] = "prioritized"
    alpha: float = Field(0.6, ge=0, le=1)
    """How much priorities count: 0 is uniform; 0.6 as in the paper (0.5 in Rainbow)."""
    beta: ScheduleField = Schedule(start=0.4)
    """How much of the bias is corrected by weights: in the paper `{kind: linear, start: 0.4, end: 1, over: …}`."""
    epsilon: float = Field(1e-6, gt=0)
    """Added to the size of each TD error, so that what is predicted well is drawn again some day."""

    def importance(self, counters: Counters) -> float:
        """β at these counters."""
        return self.beta.value(counters)


class HindsightReplay(MemorySection):
    """For goal environments (observations with `achieved_goal` and `desired_goal`): most transitions are drawn as if
    what was achieved later had been the goal (Andrychowicz et al. 2017)."""

    kind: Literal["hindsight"] = "hindsight"
    strategy: Literal["future", "final", "episode"] = "future"
    """Where the other goal comes from: any later step of the episode (best in the paper), its last one, or any."""
    relabeled_fraction: float = Field(0.8, ge=0, le=1)
    """Share of transitions that get another goal; k/(k+1), 0.8 is the paper's k = 4."""
    reward: str = "sparse"
    """The reward for reaching a goal: `sparse` (0 within `threshold`, else −1), or `module:function`, which answers
    `(achieved [B, …], desired [B, …])` with `(reward [B], terminated [B])`."""
    threshold: float = Field(0.05, ge=0)
    """Greatest distance (Euclidean) at which `sparse` counts a goal as reached; 0.05 as in the robotics tasks."""
    terminates: bool = False
    """Whether `sparse` ends the episode where the goal is reached, as the environment does or does not."""


class BalancedReplay(MemorySection):
    """Every class of transitions has an equal share of what is drawn, however rare it is."""

    kind: Literal["balanced"] = "balanced"
    classes: Literal["action", "reward_sign"] = "action"
    """What a transition's class is: its discrete action, or whether its reward is negative, zero or positive."""


ReplayBufferConfig = UniformReplay | PrioritizedReplay | HindsightReplay | BalancedReplay
ReplayBufferField = Annotated[ReplayBufferConfig, Discriminator("kind")]
"""A memory's section as a config field."""


LARGE_NETWORK: Mapping[str, Any] = {"hidden_sizes": [256, 256], "activation": "relu"}
"""Of actors and critics, as TD3's and SAC's authors, Stable-Baselines3 (SAC) and CleanRL have it."""
FEW_STEPS_AHEAD: Mapping[str, Any] = {"fragment_steps": 8, "fragments_per_update": 1, "max_policy_lag": 2}
"""Rollout of algorithms that learn while they act: workers act on during gradient steps, as replay allows."""


class OffPolicyConfig(AlgorithmConfig):
    """The fields that every algorithm with a replay buffer has."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "policies": LARGE_NETWORK,
        "heatup": "1000 env_steps",
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


class ActorConfig(Cloning, OffPolicyConfig):
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
    temperature_learning_rate: ScheduleField | None = None
    """Step size of the temperature; `learning_rate` by default."""
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

    learner: ClassVar[str] = "trainer_node.learning.algorithms.sac:SAC"
    name: str = "sac"


class TD3Config(ActorConfig):
    """Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018), for boxes with bounds."""

    learner: ClassVar[str] = "trainer_node.learning.algorithms.td3:TD3"
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

    learner: ClassVar[str] = "trainer_node.learning.algorithms.td3:TD3"
    policy: ClassVar[str] = "deterministic"
    critics: ClassVar[int] = 1
    policy_delay: ClassVar[int] = 1
    target_noise: ClassVar[float] = 0.0
    target_noise_clip: ClassVar[float] = 0.0
    name: str = "ddpg"
