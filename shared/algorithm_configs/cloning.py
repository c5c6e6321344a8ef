"""The configuration of behavioural cloning beside an algorithm that learns by rewards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from shared.algorithm_configs.section import AlgorithmConfig
from shared.schedules import ScheduleField
from shared.section import Section

if TYPE_CHECKING:
    from shared.config import Config


class CloningConfig(Section):
    """Cloning of the demonstrations beside what is learnt by rewards, as a term of the policy's loss."""

    strength: ScheduleField
    """Weight of the cloning loss: a schedule that ends at 0, so that the policy can become better than what it
    imitates, or a number. At 0 nothing is cloned."""
    minibatch_size: int = Field(64, ge=1)
    """Demonstrated steps that each gradient step of the policy clones beside its minibatch."""

    @model_validator(mode="after")
    def _never_away_from_them(self) -> Self:
        strength = self.strength
        values = [strength.start, *(value for _, value in strength.points)]
        values += [strength.end] if strength.kind in {"linear", "exponential", "cosine"} else []
        if min(values) < 0:
            raise ValueError(f"strength comes to {min(values):g}; below 0 it would unlearn what was demonstrated")
        return self


class Cloning(AlgorithmConfig):
    """What algorithms have that can clone demonstrations beside what they learn by rewards."""

    behavioural_cloning: CloningConfig | None = None
    """`{strength: {kind: linear, start: 0.5, end: 0, over: 50000 env_steps}}`: also do what `demonstrations` did
    (docs/DEMONSTRATIONS.md)."""

    @property
    def imitating(self) -> tuple[str, ...]:
        """By cloning, where that is asked for."""
        return super().imitating + (() if self.behavioural_cloning is None else ("behavioural_cloning",))

    def refuse_demonstrations(self, run: Config) -> None:
        """Raises `ValueError` also where a policy has a core."""
        super().refuse_demonstrations(run)
        remembering = sorted(policy_id for policy_id, size in run.state_sizes.items() if size)
        if remembering and self.behavioural_cloning is not None:
            raise ValueError(
                f"policies.{remembering[0]}.core={run.policies[remembering[0]].core} with "
                f"algorithm.behavioural_cloning: recorded experience does not say what the policy would have "
                f"remembered; set core=none"
            )
