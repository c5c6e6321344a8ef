"""Reward signals in addition to the environment's: novelty (RND, curiosity) or similarity to demonstrations (GAIL)."""

import difflib
import re
from typing import Any, Self

from pydantic import ConfigDict, Field, model_validator

from stagecoach.shared.config.schema.section import OWN_KIND, Schedule, ScheduleField, Section, Width


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


class OwnSignalConfig(SignalConfig):
    """Custom signal under a name of your own (docs/how-to/own-reward-signal.md)."""

    kind: str = Field(OWN_KIND, pattern=r"^[\w.]+:\w+$")
    """Import path of a class that derives from `stagecoach.RewardSignal`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class, in addition to the policy."""


class RewardSignalsConfig(Section):
    """Reward signals, each with a strength, a discount and, without a replay buffer, a value network
    (docs/guides/reward-signals.md). Any other name is a custom signal: `{kind: module:Class, kwargs: {}}` and the
    fields of every signal (docs/how-to/own-reward-signal.md)."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, OwnSignalConfig] = Field(init=False)

    extrinsic: ExtrinsicConfig = ExtrinsicConfig()
    rnd: RNDConfig | None = None
    """Random network distillation; `{}` takes it with its defaults."""
    icm: ICMConfig | None = None
    """Intrinsic curiosity; `{}` takes it with its defaults."""
    gail: GAILConfig | None = None
    """Generative adversarial imitation of `demonstrations`; docs/guides/demonstrations.md."""

    @property
    def own(self) -> list[str]:
        """Names of the custom signals, in the order in which they are added up."""
        return sorted(self.__pydantic_extra__)

    @model_validator(mode="before")
    @classmethod
    def _own_have_a_kind(cls, data: Any) -> Any:
        """Accepts `name: module:Class` for a custom signal without arguments."""
        own = sorted({*data} - {*cls.model_fields}, key=str) if isinstance(data, dict) else []
        named = {name: {"kind": data[name]} if isinstance(data[name], str) else data[name] for name in own}
        for name, section in named.items():
            if not (hasattr(section, "kind") or (isinstance(section, dict) and "kind" in section)):
                guesses = difflib.get_close_matches(str(name), cls.model_fields, n=1)
                hint = f"did you mean {guesses[0]}?" if guesses else "a signal of your own needs kind: module:Class"
                raise ValueError(f"unknown key {name}; {hint}")
            if not re.fullmatch(r"[a-z][a-z0-9_]*", str(name)):
                raise ValueError(f"{name!r} is not a name for a signal; use lower-case letters, digits and _")
        return {**data, **named} if named else data

    @model_validator(mode="after")
    def _some_signal(self) -> Self:
        names = [name for name in type(self).model_fields if name != "extrinsic"]
        if not self.own and all(getattr(self, name) is None for name in names):
            raise ValueError(
                f"extrinsic needs no section; add one of {', '.join(names)}, or leave "
                f"reward_signals out (policies.<id>.reward_scale scales rewards)"
            )
        return self
