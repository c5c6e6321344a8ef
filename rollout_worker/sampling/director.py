"""Directors decide the episodes of one sampler by the tables that came with the policy version.

Each decision follows from a table and the episode's seed, so that a successor of this worker repeats it. The episode's
record holds the decision; folds in the trainer make the next tables from these records.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from stagecoach.rollout_worker.environments.parameters import EpisodeParameters
from stagecoach.shared.experience.fragment import EpisodeRecord
from stagecoach.shared.experience.spaces import Array, Columns
from stagecoach.shared.policies.policy import Policy

Running = Sequence[Mapping[str, Any]]
"""Decisions for each running episode, as data for JSON."""


class EpisodeDirector(Protocol):
    """Decides one aspect of each episode, by the table of a fold (`stagecoach.Fold`)."""

    def begin(self, environment: int, episode: int, seed: int) -> None:
        """Decides an episode that begins.

        Args:
            environment: index of the environment in its worker.
            episode: how many episodes that environment has begun before.
            seed: of the episode.
        """

    def judged(self, environment: int, record: EpisodeRecord) -> EpisodeRecord:
        """Returns the record of an episode that ended, with the decision added."""

    def trace(self) -> Running:
        """Returns what a successor needs to resume the running episodes."""

    def accepts(self, running: Running) -> bool:
        """Returns whether `running` is a valid trace that this run's config allows."""

    def take_up(self, running: Running, states: Mapping[str, Array]) -> None:
        """Resumes the episodes of a trace; `states` are those of the predecessor's policies."""


@dataclass(frozen=True)
class Part:
    """Slots that one player acts for."""

    player: str
    rows: Array
    learns: Array
    """`[R]`: true for rows that are learned from."""


class Seating(EpisodeDirector, Protocol):
    """Decides who acts in which slots, and acts for those whose policy does not learn."""

    def parts(self, group: str, rows: Array) -> Iterator[Part]:
        """Yields the players of the slots `rows` of the policy `group`."""

    def act(
        self, parts: Sequence[Part], group: str, observations: Columns, policy: Policy, generator: torch.Generator,
        actions: Columns,
    ) -> None:  # fmt: skip
        """Writes the actions of opponents into `actions`; `policy` is any with the spaces of the group."""

    def learning(self, group: str, policy_id: str) -> Array:
        """Returns `[S]`: the slots of `group` in which `policy_id` acts and learns."""

    def forget(self, group: str, over: Array) -> None:
        """Clears what opponents remember in the slots where `over` `[S]` an agent has ended."""

    def remembered(self) -> dict[str, Array]:
        """Returns the states of recurrent opponents, by name."""

    def objects(self) -> Collection[str]:
        """Returns the SHA-256 of the shared objects that the running episodes use."""


@dataclass(frozen=True)
class Directors:
    """All directors of one sampler."""

    parameters: EpisodeParameters | None = None
    """Called by the environments as they reset."""
    seating: Seating | None = None

    @property
    def _all(self) -> dict[str, EpisodeDirector]:
        found = {"parameters": self.parameters, "seating": self.seating}
        return {name: director for name, director in found.items() if director is not None}

    def trace(self) -> dict[str, Running]:
        return {name: director.trace() for name, director in self._all.items()}

    def accepts(self, running: Mapping[str, Running]) -> bool:
        """Returns whether each director accepts its trace; recorded experience has an empty one."""
        return not running or all(director.accepts(running.get(name, ())) for name, director in self._all.items())

    def take_up(self, running: Mapping[str, Running], states: Mapping[str, Array]) -> None:
        for name, director in self._all.items():
            director.take_up(running.get(name, ()), states)
