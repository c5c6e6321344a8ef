"""What every algorithm's section has, and what roles other than the trainer know of an algorithm by it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import ConfigDict, Field, ValidationError

from shared.config_errors import in_words
from shared.errors import ConfigError
from shared.exploration_config import ExplorationConfig, Sampling
from shared.schedules import Schedule, ScheduleField
from shared.section import Section
from shared.user_code import import_object

if TYPE_CHECKING:
    from shared.config import Config


class AlgorithmConfig(Section):
    """The fields that every algorithm has. A subclass adds its own and says what acts for it."""

    policy: ClassVar[str] = "actor_critic"
    """The kind of policy (shared/policies/registry.py) that it learns."""
    learns_from_others: ClassVar[bool] = True
    """Whether it may learn from what its own policy did not act; needed for `dataset`."""
    recurrent_policy: ClassVar[str | None] = None
    """The kind that it learns where a policy has a `core`; None where it cannot learn sequences."""
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """What other sections are by default in a run of this algorithm, as in a config's file; `policies` is for each of
    them. What the user says counts before this, and this before the sections' own defaults."""
    name: str
    """The algorithm."""
    learning_rate: ScheduleField = Schedule(start=3e-4)
    """Adam's step size: a number, or `{kind: linear, start: 1e-3, end: 0, over: 100000 env_steps}`."""
    gamma: float = Field(0.99, ge=0, le=1)
    """Discount per env step."""

    @property
    def acting(self) -> ExplorationConfig:
        """How workers choose actions in training."""
        return Sampling()

    def network(self) -> dict[str, Any]:
        """What it asks of the policy's network beside `PolicyConfig`: keyword arguments of the policy class (JSON)."""
        return {}

    def refuse(self, run: Config) -> None:
        """Raises `ValueError` for a run that this algorithm cannot learn in."""

    @property
    def imitating(self) -> tuple[str, ...]:
        """Its fields by which it learns from the run's demonstrations."""
        return ()

    def refuse_demonstrations(self, run: Config) -> None:
        """Raises `ValueError` where it imitates nothing that there is, or there is what it does not imitate."""
        if self.imitating and run.demonstrations is None:
            raise ValueError(
                f"algorithm.{self.imitating[0]} imitates recorded experience; name it in demonstrations.path"
            )
        if run.demonstrations is not None and not self.imitating:
            raise ValueError(
                f"demonstrations.path={run.demonstrations.path} with algorithm.name={self.name}, which would do "
                f"nothing with them; say how they are used (docs/DEMONSTRATIONS.md), or leave them out"
            )

    def resolved(self) -> AlgorithmConfig:
        """The section with its own type; for a user's algorithm this imports it."""
        return self


class OwnAlgorithm(AlgorithmConfig):
    """An algorithm of the user's: `name: package.module:Class`. Its class says which fields there are (`Class.Config`).

    Nothing is imported while a config is only read.
    """

    model_config = ConfigDict(extra="allow")

    def refuse_demonstrations(self, run: Config) -> None:
        """Its own section knows, once it is imported."""

    def resolved(self) -> AlgorithmConfig:
        """The section as the class's `Config`; raises `ConfigError` where that cannot be."""
        section = getattr(import_object(self.name, "algorithm.name", kind="Class"), "Config", None)
        if not (isinstance(section, type) and issubclass(section, AlgorithmConfig)):
            raise ConfigError(
                f"algorithm.name={self.name}: the class has no `Config`; let it have one that derives from "
                f"shared.algorithm_configs.section.AlgorithmConfig"
            )
        given = self.model_dump(include=self.model_fields_set | set(self.model_extra or {}))
        try:
            found: AlgorithmConfig = section.model_validate(given)
        except ValidationError as error:
            lines = [in_words(item, ".".join(("algorithm", *map(str, item["loc"])))) for item in error.errors()]
            raise ConfigError("; ".join(lines)) from None
        return found


class BatchOfUpdate:
    """For algorithms that learn each update's batch in minibatches: one must fit into it."""

    minibatch_size: int

    def refuse(self, run: Config) -> None:
        """Raises `ValueError` where a minibatch is more than the batch, or less than one slot's sequence of it."""
        if self.minibatch_size < run.rollout.fragment_steps and any(run.state_sizes.values()):
            raise ValueError(
                f"algorithm.minibatch_size={self.minibatch_size} is less than rollout.fragment_steps="
                f"{run.rollout.fragment_steps}: a policy with a core learns whole sequences of a fragment; raise the "
                f"first or lower the second"
            )
        if self.minibatch_size > run.transitions_per_update:
            rollout = run.rollout
            raise ValueError(
                f"algorithm.minibatch_size={self.minibatch_size} is more than one update's batch of "
                f"{run.transitions_per_update} transitions (rollout.fragments_per_update="
                f"{rollout.fragments_per_update} × rollout.fragment_steps={rollout.fragment_steps} × "
                f"environment.num_envs={run.environment.num_envs}); lower the first or raise one of the others"
            )
