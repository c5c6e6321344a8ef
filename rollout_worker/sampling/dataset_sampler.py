"""Recorded experience in place of environments: fragments of pieces of a dataset, shuffled, without end.

The dataset is cut into pieces of a fragment's steps. In each epoch all of them are taken once, in an order that follows
from the worker's seed lineage and the epoch; a fragment has as many beside each other as there are environments. So
what a fragment holds follows from the lineage and its number in it, and a successor continues without replaying. Of
several policies each has pieces of its own, for as many slots as its agents have; one that does not learn has none.
"""

import functools
import time
from collections.abc import Mapping, Sequence

import numpy as np

from stagecoach.rollout_worker.environments.seeding import SeedLineage
from stagecoach.rollout_worker.exploration.base import Exploration
from stagecoach.rollout_worker.sampling.action_trace import ActionTrace
from stagecoach.rollout_worker.sampling.sampler import Sample
from stagecoach.shared.datasets.recording import Recordings
from stagecoach.shared.experience.fragment import INFO, EpisodeRecord, expected_columns
from stagecoach.shared.experience.spaces import Array, Columns, EnvironmentDescription, PolicySpaces
from stagecoach.shared.league.table import MatchTable
from stagecoach.shared.policies.policy import Policy


@functools.lru_cache(maxsize=2)
def _shuffled(lineage: SeedLineage, epoch: int, count: int) -> Array:
    generator = np.random.Generator(np.random.PCG64(lineage.shuffling(epoch)))
    return generator.permutation(count)


class DatasetSampler:
    """Does what `Sampler` does, but asks no policy and steps nothing."""

    def __init__(
        self, recordings: Recordings, description: EnvironmentDescription, num_envs: int, lineage: SeedLineage,
        trace: ActionTrace | None = None,
    ) -> None:  # fmt: skip
        """Begins `lineage`, or takes it up where a predecessor's trace ends."""
        self._recordings, self._description, self._envs, self.lineage = recordings, description, num_envs, lineage
        self._number = trace.number + 1 if trace else 0

    def sample(
        self, policies: Mapping[str, Policy], exploration: Mapping[str, Exploration], steps: int,
        table: MatchTable | None = None,
    ) -> Sample:  # fmt: skip
        """The next fragment; how anything would be acted does not matter."""
        started = time.perf_counter()
        columns: dict[str, Columns] = {}
        episodes: list[EpisodeRecord] = []
        for policy_id, spaces in self._description.policies.items():
            slots = self._envs * self._description.slots(policy_id)
            if (recording := self._recordings.get(policy_id)) is None:
                columns[policy_id] = _nothing(spaces, steps, slots, self._description.info_columns)
                continue
            count = recording.pieces(steps)
            places = range(self._number * slots, (self._number + 1) * slots)
            pieces = [int(_shuffled(self.lineage, place // count, count)[place % count]) for place in places]
            columns[policy_id], ended = recording.cut(pieces, steps)
            episodes += ended
        self._number += 1
        return Sample(columns, tuple(episodes), steps * self._envs, time.perf_counter() - started, 0.0)

    @property
    def position_digest(self) -> str:
        """A successor that reads the same dataset comes to the same place."""
        return self._recordings.sha256

    def traced(self, sample: Sample) -> ActionTrace:
        """The last sample's part of the trace: no episode has to be acted again."""
        actions = {
            policy_id: {name: sample.columns[policy_id][name][:0] for name in spaces.action.column_names("action")}
            for policy_id, spaces in self._description.policies.items()
        }
        nothing = (0,) * self._envs
        return ActionTrace(nothing, nothing, actions, self.lineage, self._number - 1, self.position_digest)

    def close(self) -> None:
        """Nothing runs."""


def _nothing(spaces: PolicySpaces, steps: int, slots: int, info_columns: Sequence[str]) -> Columns:
    """The columns of a policy of which nothing was acted."""
    expected = expected_columns(spaces, steps, slots, info_columns=info_columns).items()
    return {
        name: np.full([max(size, 0) for size in shape], np.nan if name.startswith(INFO) else 0, dtype)
        for name, (shape, dtype) in expected
    }
