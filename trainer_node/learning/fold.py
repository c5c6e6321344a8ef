"""Folds: states that follow the experience log, travel with each policy version, and are part of each checkpoint.

Built-in folds are registered in `folds.py`; `folds` in the config names a user's own classes. The trainer gives every
episode to each fold in log order. Its table decides the episodes that workers begin (rollout_worker/directors.py),
and it observes their records in turn. Nothing but these calls may change a fold: no clock, no random state outside
`state`. Then a trainer that learns the log again, and a replay, reach the same state, bit by bit.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from stagecoach.shared.config.environments.parameters import sampler_of
from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.experience.fragment import EpisodeRecord, Fragment, FragmentHeader
from stagecoach.shared.experience.parameters import ParameterTable
from stagecoach.shared.experience.spaces import Array, PlainData
from stagecoach.shared.policies.policy import Policy


class Fold:
    """Base of all folds; override what is needed. `state` and `load_state` have to hold everything that changes."""

    name = ""
    """Key under `folds`; it names the fold in checkpoints, metrics and events."""
    resettable: Collection[str] = ()
    """The policies that `after_update` may return."""

    def observe_fragment(self, header: FragmentHeader, counters: Counters) -> None:
        """Observes a fragment of the training phase; by default each of its episodes.

        Args:
            header: of the fragment, with the records of the episodes that ended in it.
            counters: of training, this fragment included.
        """
        for record in header.episodes:
            self.observe_episode(record, counters)

    def observe_episode(self, record: EpisodeRecord, counters: Counters) -> None:
        """Observes an episode that ended.

        Args:
            record: `episode_return` (undiscounted, over all agents), `length`, `success` (None if the environment does
                not report it), `agent_returns` by agent, `metrics` by name, and `parameters`, the values drawn for it.
            counters: `env_steps`, `episodes`, `updates` and `gradient_steps` of training so far.
        """

    def observe_update(self, fragments: Sequence[Fragment], advantages: Array | None) -> None:
        """Observes what an update learned from.

        Args:
            fragments: K of them, in log order.
            advantages: `[T, all slots]`, fragments next to each other; None where the algorithm has none.
        """

    def after_update(self, policies: Mapping[str, Policy], updates: int) -> Collection[str]:
        """Returns the policies that begin again with their initial weights; `updates` are those done so far."""
        return ()

    def parameters(self) -> Mapping[str, Any]:
        """Returns the environment parameters of the next episodes: a value or a sampler (as in
        `environment.parameters`) by name."""
        return {}

    def table(self, counters: Counters) -> PlainData:
        """Returns what workers decide episodes by, from the next policy version on: `parameters`, for a user's fold."""
        return ParameterTable({name: sampler_of(value) for name, value in self.parameters().items()})

    def state(self) -> Mapping[str, Any]:
        """Returns the whole state; the inverse is `load_state`.

        It must survive JSON unchanged: text as keys, lists instead of tuples, no NaN.
        """
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues from what `state` returned; raises `ValueError`, `TypeError` or `KeyError` for anything else."""

    def new_objects(self) -> Mapping[str, bytes]:
        """Returns objects by SHA-256 that must be durable before a version or a checkpoint names them."""
        return {}

    def objects(self) -> Collection[str]:
        """Returns the SHA-256 of all objects in the store that the state names."""
        return ()

    def metrics(self) -> Mapping[str, float]:
        """Returns numbers for metrics and checkpoints, which show them as `NAME/KEY`."""
        return {}

    def drain_events(self) -> list[str]:
        """Returns lines for the run's events, each once."""
        return []


def encode(fold: Fold) -> bytes:
    """Encodes a fold's state as an object of a checkpoint; equal states have equal bytes."""
    return json.dumps(fold.state(), sort_keys=True, separators=(",", ":")).encode()


def all_metrics(folds: Sequence[Fold]) -> dict[str, float]:
    """Returns the metrics of all folds, by `NAME/KEY`."""
    return {f"{fold.name}/{key}": value for fold in folds for key, value in fold.metrics().items()}
