"""Reward signals beside the environment's: what is new (RND, curiosity), or looks like a demonstration (GAIL)."""

from typing import Self

from pydantic import Field, model_validator

from stagecoach.shared.config.schema.section import Schedule, ScheduleField, Section, Width


class ExtrinsicConfig(Section):
    """The rewards of the environment. Their discount is `algorithm.gamma`."""

    strength: float = Field(1.0, ge=0)
    """What its advantages (with a replay buffer, its rewards) are multiplied by before those of all signals are added
    up; 0 leaves it out."""


class SignalConfig(Section):
    """What every further signal has."""

    strength: float = Field(1.0, gt=0)
    """What its advantages (with a replay buffer, its rewards) are multiplied by before those of all signals are added
    up."""
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
    """Each with a strength, a discount and, without a replay buffer, a value network. docs/REWARD_SIGNALS.md."""

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
