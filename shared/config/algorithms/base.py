"""Base classes of the algorithms' sections: the fields and facts that other roles use."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import ConfigDict, Field

from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.base.foreign_names import FOREIGN_NAMES
from stagecoach.shared.base.user_code import import_object
from stagecoach.shared.config.algorithms.exploration import ExplorationConfig, Sampling
from stagecoach.shared.config.algorithms.replay_buffer import MemorySection
from stagecoach.shared.config.algorithms.reward_signals import RewardSignalsConfig
from stagecoach.shared.config.schema.section import Schedule, ScheduleField, Section
from stagecoach.shared.config.schema.validation import validated


def _constant_name(schema: dict[str, Any]) -> None:
    """Lets an editor choose the algorithm's section by its name."""
    name = schema["properties"]["name"]
    name |= {"const": name["default"]} if "default" in name else {}


class AlgorithmConfig(Section):
    """The fields that every algorithm has. A subclass adds its own and says what acts for it."""

    model_config = ConfigDict(json_schema_extra=_constant_name)

    learner: ClassVar[str] = ""
    """Import path of the class, `package.module:Class`; for a custom algorithm that is its `name`."""
    policy: ClassVar[str] = "actor_critic"
    """Kind of policy that it learns (shared/policies/registry.py)."""
    learns_from_others: ClassVar[bool] = True
    """Accepts experience of other policies, as a `dataset` needs."""
    corrects_policy_lag: ClassVar[bool] = True
    """Accepts experience of older versions of its policy, as `rollout.max_policy_lag` needs."""
    recurrent_policy: ClassVar[str | None] = None
    """Kind of policy with a `core`; None if the algorithm cannot learn sequences."""
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Defaults of other sections in a run of this algorithm; `policies` applies to each policy."""
    name: str
    """The algorithm."""
    learning_rate: ScheduleField = Schedule(start=3e-4)
    """Adam's step size: a number, or `{kind: linear, start: 1e-3, end: 0, over: 100000 env_steps}`."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of policy and critics (AdamW, Loshchilov and Hutter 2019); 0 is plain Adam."""
    gamma: float = Field(0.99, ge=0, le=1)
    """Discount per env step."""

    if not TYPE_CHECKING:  # a checker reports unknown names by itself

        def __getattr__(self, name: str) -> Any:
            if name in FOREIGN_NAMES:
                raise AttributeError(f"{type(self).__name__} is a section of a config; {FOREIGN_NAMES[name]}")
            return super().__getattr__(name)

    @property
    def acting(self) -> ExplorationConfig:
        """Exploration of the workers: the field `exploration`, else sampling from the policy."""
        found: ExplorationConfig = getattr(self, "exploration", Sampling())
        return found

    def network(self) -> dict[str, Any]:
        """Returns keyword arguments of the policy class, in addition to `PolicyConfig` (JSON)."""
        return {}

    def validate_run(self, run: Any) -> None:
        """Raises `ValueError` if a custom algorithm cannot learn in this run, a `Config`."""

    @property
    def replay(self) -> MemorySection | None:
        """Replay buffer; None without one."""
        return None

    @property
    def cloning(self) -> CloningConfig | None:
        """Behavioral cloning in addition to the algorithm; None without it."""
        return None

    @property
    def signals(self) -> RewardSignalsConfig | None:
        """Reward signals; None without them."""
        return None

    @property
    def imitating(self) -> tuple[str, ...]:
        """Names of the fields that learn from the run's demonstrations."""
        gail = self.signals is not None and self.signals.gail is not None
        return ("behavioral_cloning",) * (self.cloning is not None) + ("reward_signals.gail",) * gail

    def resolved(self) -> AlgorithmConfig:
        """Returns the section with its own type; imports a custom algorithm."""
        return self


class OwnAlgorithm(AlgorithmConfig):
    """A custom algorithm, `name: package.module:Class`, with the fields of `Class.Config`. Reading a config imports
    nothing."""

    model_config = ConfigDict(extra="allow")

    def resolved(self) -> AlgorithmConfig:
        """Returns the section as the class's `Config`; raises `ConfigError` without one."""
        section = getattr(import_object(self.name, "algorithm.name", kind="Class"), "Config", None)
        if not (isinstance(section, type) and issubclass(section, AlgorithmConfig)):
            raise ConfigError(
                f"algorithm.name={self.name}: the class has no `Config`; let it have one that derives from "
                f"stagecoach.AlgorithmConfig"
            )
        given = self.model_dump(include=self.model_fields_set | set(self.model_extra or {}))
        found: AlgorithmConfig = validated(section, given, "algorithm.")
        return found


class BatchOfUpdate(AlgorithmConfig):
    """Base of algorithms that split each update's batch into minibatches."""

    minibatch_size: int = Field(64, ge=1)
    """Transitions in one gradient step."""


class CloningConfig(Section):
    """Behavioral cloning of the demonstrations, as a term of the policy's loss."""

    strength: ScheduleField
    """Weight of the cloning loss. Use a schedule that ends at 0, so that the policy can surpass the demonstrations."""
    minibatch_size: int = Field(64, ge=1)
    """Demonstrated steps in each gradient step of the policy."""


class MarginCloningConfig(CloningConfig):
    """Behavioral cloning for Q-learning, by a large margin."""

    margin: float = Field(0.8, gt=0)
    """Margin by which the value of the demonstrated action should exceed all others; 0.8 as in DQfD."""


class Cloning(AlgorithmConfig):
    """Base of algorithms that can also clone demonstrations."""

    behavioral_cloning: CloningConfig | None = None
    """`{strength: {kind: linear, start: 0.5, end: 0, over: 50000 env_steps}}` clones `demonstrations` as well."""

    @property
    def cloning(self) -> CloningConfig | None:
        return self.behavioral_cloning


class Signals(Cloning):
    """Base of algorithms that can learn from reward signals."""

    reward_signals: RewardSignalsConfig | None = None
    """Intrinsic and imitation rewards in addition to the environment's; none by default."""

    @property
    def signals(self) -> RewardSignalsConfig | None:
        return self.reward_signals
