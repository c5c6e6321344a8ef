"""What every algorithm's section has: what other roles know of it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from pydantic import ConfigDict, Field

from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.base.user_code import import_object
from stagecoach.shared.config.algorithms.exploration import ExplorationConfig, Sampling
from stagecoach.shared.config.algorithms.reward_signals import RewardSignalsConfig
from stagecoach.shared.config.schema.section import Schedule, ScheduleField, Section
from stagecoach.shared.config.schema.validation import validated


def _constant_name(schema: dict[str, Any]) -> None:
    """Lets an editor tell by its name which algorithm's section it completes and checks."""
    name = schema["properties"]["name"]
    name |= {"const": name["default"]} if "default" in name else {}


class AlgorithmConfig(Section):
    """The fields that every algorithm has. A subclass adds its own and says what acts for it."""

    model_config = ConfigDict(json_schema_extra=_constant_name)

    learner: ClassVar[str] = ""
    """Its class, `package.module:Class`; that of a user's own algorithm is its `name`."""
    policy: ClassVar[str] = "actor_critic"
    """The kind of policy (shared/policies/registry.py) that it learns."""
    learns_from_others: ClassVar[bool] = True
    """Whether it may learn from what its own policy did not act; needed for `dataset`."""
    corrects_policy_lag: ClassVar[bool] = True
    """Whether it may learn from what an older version of its policy acted; needed for `rollout.max_policy_lag`."""
    recurrent_policy: ClassVar[str | None] = None
    """The kind that it learns where a policy has a `core`; None where it cannot learn sequences."""
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Defaults of other sections in a run of this algorithm, as in a config's file; `policies` is for each of them."""
    name: str
    """The algorithm."""
    learning_rate: ScheduleField = Schedule(start=3e-4)
    """Adam's step size: a number, or `{kind: linear, start: 1e-3, end: 0, over: 100000 env_steps}`."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's (Loshchilov and Hutter 2019): each step takes `learning_rate` times this share off every weight of policy
    and critics; 0 is plain Adam."""
    gamma: float = Field(0.99, ge=0, le=1)
    """Discount per env step."""

    @property
    def acting(self) -> ExplorationConfig:
        """How workers choose actions in training: by its field `exploration`, or by sampling from the policy."""
        found: ExplorationConfig = getattr(self, "exploration", Sampling())
        return found

    def network(self) -> dict[str, Any]:
        """What it asks of the policy's network beside `PolicyConfig`: keyword arguments of the policy class (JSON)."""
        return {}

    def validate_run(self, run: Any) -> None:
        """Raises `ValueError` for a run, a `Config`, that an algorithm of the user's cannot learn in."""

    @property
    def imitating(self) -> tuple[str, ...]:
        """Its fields by which it learns from the run's demonstrations."""
        return ()

    def resolved(self) -> AlgorithmConfig:
        """The section with its own type; for a user's algorithm this imports it."""
        return self


class OwnAlgorithm(AlgorithmConfig):
    """An algorithm of the user's: `name: package.module:Class`. Its class says which fields there are (`Class.Config`).
    Nothing is imported while a config is only read."""

    model_config = ConfigDict(extra="allow")

    def resolved(self) -> AlgorithmConfig:
        """The section as the class's `Config`; raises `ConfigError` where that cannot be."""
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
    """For algorithms that learn each update's batch in minibatches, which must fit into it."""

    minibatch_size: int = Field(64, ge=1)
    """Transitions in one gradient step."""


class CloningConfig(Section):
    """Cloning of the demonstrations beside what is learned by rewards, as a term of the policy's loss."""

    strength: ScheduleField
    """Weight of the cloning loss: best a schedule that ends at 0, so that the policy can surpass what it imitates."""
    minibatch_size: int = Field(64, ge=1)
    """Demonstrated steps that each gradient step of the policy clones beside its minibatch."""


class MarginCloningConfig(CloningConfig):
    """Cloning beside Q-learning, by a large margin."""

    margin: float = Field(0.8, gt=0)
    """By how much the demonstrated action is to be better than any other, in units of the values; 0.8 as in DQfD."""


class Cloning(AlgorithmConfig):
    """What algorithms have that can clone demonstrations beside what they learn by rewards."""

    behavioral_cloning: CloningConfig | None = None
    """`{strength: {kind: linear, start: 0.5, end: 0, over: 50000 env_steps}}` clones `demonstrations` as well."""

    @property
    def imitating(self) -> tuple[str, ...]:
        """By cloning, where that is asked for."""
        return super().imitating + (() if self.behavioral_cloning is None else ("behavioral_cloning",))


class Signals(Cloning):
    """What algorithms have that can learn from further rewards."""

    reward_signals: RewardSignalsConfig | None = None
    """Rewards beside the environment's, for tasks whose own are rare; none by default."""

    @property
    def imitating(self) -> tuple[str, ...]:
        """By cloning, and by a reward signal."""
        gail = self.reward_signals is not None and self.reward_signals.gail is not None
        return super().imitating + (("reward_signals.gail",) if gail else ())
