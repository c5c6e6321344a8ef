"""The configurations of reward signals beside the environment's, and of PPO, A2C, APPO and IMPALA."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from shared.config.algorithms.base import BatchOfUpdate, Cloning
from shared.config.section import Schedule, ScheduleField, Section, Width


class ExtrinsicConfig(Section):
    """The rewards of the environment. Their discount is `algorithm.gamma`."""

    strength: float = Field(1.0, ge=0)
    """What its advantages are multiplied by before those of all signals are added up; 0 leaves it out."""


class SignalConfig(Section):
    """What every further signal has."""

    strength: float = Field(1.0, gt=0)
    """What its advantages are multiplied by before those of all signals are added up."""
    gamma: float = Field(0.99, ge=0, le=1)
    """Discount per env step of this signal's returns."""
    episodic: bool = False
    """Whether the end of an episode ends its returns. Not for what rewards the new: that an episode is over should not
    make the agent avoid what it has not seen yet (Burda et al. 2019, section 2.3)."""
    learning_rate: ScheduleField = Schedule(start=1e-4)
    """Adam's step size of the signal's own networks. Its value network has that of the algorithm."""


class RNDConfig(SignalConfig):
    """Random network distillation (Burda et al. 2019): what a network cannot predict yet has seldom been seen."""

    hidden_sizes: tuple[Width, ...] = (64, 64)
    """Layers of target and predictor, behind the convolutions of images."""
    embedding_size: Width = 64
    """Numbers that are predicted."""


class ICMConfig(SignalConfig):
    """Intrinsic curiosity (Pathak et al. 2017): where an action leads is rewarding while it cannot be predicted."""

    hidden_sizes: tuple[Width, ...] = (64, 64)
    """Layers of the features, behind the convolutions of images."""
    embedding_size: Width = 64
    """Features of an observation."""
    model_sizes: tuple[Width, ...] = (64,)
    """Layers of the forward and of the inverse model."""
    forward_weight: float = Field(0.2, ge=0, le=1)
    """β: the share of the forward model's loss; the rest is the inverse model's."""


class GAILConfig(SignalConfig):
    """Generative adversarial imitation (Ho and Ermon 2016): what looks like the run's demonstrations."""

    episodic: bool = True
    """Whether the end of an episode ends its returns, as it ends what can be imitated."""
    hidden_sizes: tuple[Width, ...] = (64, 64)
    """Layers of the discriminator, behind the convolutions of images."""
    use_actions: bool = True
    """Whether the discriminator looks at actions as well; without, it is enough to be seen where they were."""
    gradient_penalty: float = Field(10.0, ge=0)
    """Weight of the discriminator's gradient penalty (Gulrajani et al. 2017); 10 as there."""


class RewardSignalsConfig(Section):
    """Reward signals: each with a strength, a discount and a value network of its own. docs/REWARD_SIGNALS.md."""

    extrinsic: ExtrinsicConfig = ExtrinsicConfig()
    rnd: RNDConfig | None = None
    """Random network distillation; `{}` takes it with its defaults."""
    icm: ICMConfig | None = None
    """Intrinsic curiosity; `{}` takes it with its defaults."""
    gail: GAILConfig | None = None
    """Generative adversarial imitation of `demonstrations`; docs/DEMONSTRATIONS.md."""

    @model_validator(mode="after")
    def _some_signal(self) -> Self:
        names = [name for name in type(self).model_fields if name != "extrinsic"]
        if all(getattr(self, name) is None for name in names):
            raise ValueError(
                f"there is none beside extrinsic, which needs no section; give one of {', '.join(names)}, or leave "
                f"reward_signals out (policies.<id>.reward_scale scales rewards)"
            )
        return self


class OnPolicyConfig(Cloning):
    """The fields that all of them have."""

    learns_from_others: ClassVar[bool] = False
    recurrent_policy: ClassVar[str | None] = "recurrent_actor_critic"
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    value_coefficient: float = Field(0.5, ge=0)
    """Weight of the value loss."""
    max_grad_norm: float = Field(0.5, gt=0)
    """Gradients are scaled down to this norm."""
    adam_epsilon: float = Field(1e-5, gt=0)
    """Adam's ε; 1e-5 as in the reference implementations."""
    reward_signals: RewardSignalsConfig | None = None
    """Rewards beside the environment's, for tasks whose own are rare; none by default."""

    @property
    def imitating(self) -> tuple[str, ...]:
        """By cloning, and by a reward signal."""
        gail = self.reward_signals is not None and self.reward_signals.gail is not None
        return super().imitating + (("reward_signals.gail",) if gail else ())


class ClippedConfig(BatchOfUpdate, OnPolicyConfig):
    """The fields of the clipped objective: several passes over each batch."""

    epochs: int = Field(10, ge=1)
    """Passes over each update's batch."""
    clip_range: ScheduleField = Schedule(start=0.2)
    """ε of the clipped objective; a number or a schedule."""
    clip_range_value: float | None = Field(None, gt=0)
    """Clip the change of the value prediction to ± this; off by default (it seldom helps)."""
    normalize_advantages: bool = True
    """Zero mean, unit variance per minibatch."""
    target_kl: float | None = Field(None, gt=0)
    """End an update's epochs once the approximate KL divergence from the policy it began with exceeds 1.5 × this."""


class VTraceConfig(Section):
    """The fields of V-trace's targets."""

    vtrace_lambda: float = Field(1.0, ge=0, le=1)
    """λ of V-trace (Espeholt et al. 2018, remark 2); 1 as in the paper."""
    rho_bar: float = Field(1.0, gt=0)
    """ρ̄: the weight of a transition is never more; decides which policy the values are of."""
    c_bar: float = Field(1.0, gt=0)
    """c̄: what later transitions weigh on earlier ones is never more; decides how fast the values are learned."""


class PPOConfig(ClippedConfig):
    """Proximal policy optimization (Schulman et al. 2017), clipped objective."""

    learner: ClassVar[str] = "trainer_node.learning.algorithms.ppo:PPO"
    name: str = "ppo"
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """λ of generalized advantage estimation (Schulman et al. 2016)."""


class A2CConfig(OnPolicyConfig):
    """Advantage actor-critic: A3C (Mnih et al. 2016) in lockstep, one gradient step for each update."""

    learner: ClassVar[str] = "trainer_node.learning.algorithms.a2c:A2C"
    corrects_policy_lag: ClassVar[bool] = False
    name: str = "a2c"
    learning_rate: ScheduleField = Schedule(start=7e-4)
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """λ of generalized advantage estimation; 1 is the n-step return of the paper."""
    normalize_advantages: bool = False
    """Zero mean, unit variance per batch."""


class APPOConfig(VTraceConfig, ClippedConfig):
    """Asynchronous PPO: the clipped objective with V-trace's advantages, for experience of older policies. Workers act
    ahead of the learner where `rollout.max_policy_lag` is 1 or more."""

    learner: ClassVar[str] = "trainer_node.learning.algorithms.appo:APPO"
    name: str = "appo"
    vtrace_lambda: float = Field(0.95, ge=0, le=1)
    """λ of V-trace; 1 in the paper, below it as in PPO."""
    clip_against: Literal["behavior", "target"] = "behavior"
    """The policy in the ratio's denominator: the one that acted, or the target network, with V-trace's weights."""
    target_updates: int = Field(1, ge=1)
    """The target network becomes the policy every so many updates; 1 is at the beginning of each."""
    kl_coefficient: float = Field(0.0, ge=0)
    """Weight of the KL divergence of the policy from the target network."""


class IMPALAConfig(VTraceConfig, OnPolicyConfig):
    """Importance-weighted actor-learner (Espeholt et al. 2018): V-trace, one gradient step for each update. Workers act
    ahead of the learner where `rollout.max_policy_lag` is 1 or more."""

    learner: ClassVar[str] = "trainer_node.learning.algorithms.a2c:IMPALA"
    name: str = "impala"
    learning_rate: ScheduleField = Schedule(start=6e-4)
    normalize_advantages: bool = False
    """Zero mean, unit variance per batch, with the weights."""
