"""Reward signals in addition to the environment's: novelty (RND, curiosity) or similarity to demonstrations (GAIL)."""

from typing import Self

from pydantic import Field, model_validator

from stagecoach.shared.config.schema.section import Schedule, ScheduleField, Section, Width


class ExtrinsicConfig(Section):
    """The rewards of the environment. Their discount is `algorithm.gamma`."""

    strength: float = Field(1.0, ge=0)
    """Weight of its advantages (with a replay buffer, its rewards) in the sum over all signals; 0 disables it."""


class SignalConfig(Section):
    """Fields of every additional signal."""

    strength: float = Field(1.0, gt=0)
    """Weight of its advantages (with a replay buffer, its rewards) in the sum over all signals."""
    gamma: float = Field(0.99, ge=0, le=1)
    """Discount per env step of this signal's returns."""
    episodic: bool = False
    """Ends the signal's returns with the episode. Off for novelty: an agent should not avoid the end of an episode for
    the novelty it would miss (Burda et al. 2019, section 2.3)."""
    learning_rate: ScheduleField = Schedule(start=1e-4)
    """Adam's step size for the signal's own networks. Its value network uses the algorithm's."""


class RNDConfig(SignalConfig):
    """Random network distillation (Burda et al. 2019): rewards observations whose random features are hard to
    predict."""

    hidden_sizes: tuple[Width, ...] = (64, 64)
    """Layers of target and predictor, behind the convolutions of images."""
    embedding_size: Width = 64
    """Number of predicted features."""


class ICMConfig(SignalConfig):
    """Intrinsic curiosity (Pathak et al. 2017): rewards actions whose outcome is hard to predict."""

    hidden_sizes: tuple[Width, ...] = (64, 64)
    """Layers of the features, behind the convolutions of images."""
    embedding_size: Width = 64
    """Features of an observation."""
    model_sizes: tuple[Width, ...] = (64,)
    """Layers of the forward and of the inverse model."""
    forward_weight: float = Field(0.2, ge=0, le=1)
    """β: the share of the forward model's loss; the rest is the inverse model's."""


class GAILConfig(SignalConfig):
    """Generative adversarial imitation (Ho and Ermon 2016): rewards similarity to the run's demonstrations."""

    episodic: bool = True
    """Ends the signal's returns with the episode, since the demonstrations end there too."""
    hidden_sizes: tuple[Width, ...] = (64, 64)
    """Layers of the discriminator, behind the convolutions of images."""
    use_actions: bool = True
    """Shows the discriminator actions as well; otherwise visiting the same observations is enough."""
    gradient_penalty: float = Field(10.0, ge=0)
    """Weight of the discriminator's gradient penalty (Gulrajani et al. 2017); 10 as there."""


class RewardSignalsConfig(Section):
    """Reward signals, each with a strength, a discount and, without a replay buffer, a value network
    (docs/guides/reward-signals.md)."""

    extrinsic: ExtrinsicConfig = ExtrinsicConfig()
    rnd: RNDConfig | None = None
    """Random network distillation; `{}` takes it with its defaults."""
    icm: ICMConfig | None = None
    """Intrinsic curiosity; `{}` takes it with its defaults."""
    gail: GAILConfig | None = None
    """Generative adversarial imitation of `demonstrations`; docs/guides/demonstrations.md."""

    @model_validator(mode="after")
    def _some_signal(self) -> Self:
        names = [name for name in type(self).model_fields if name != "extrinsic"]
        if all(getattr(self, name) is None for name in names):
            raise ValueError(
                f"extrinsic needs no section; add one of {', '.join(names)}, or leave "
                f"reward_signals out (policies.<id>.reward_scale scales rewards)"
            )
        return self
