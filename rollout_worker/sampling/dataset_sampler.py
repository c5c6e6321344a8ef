"""Recorded experience in place of environments: fragments of pieces of a dataset, shuffled, without end.

The dataset is cut into pieces of a fragment's steps. In each epoch all of them are taken once, in an order that follows
from the worker's seed lineage and the epoch; a fragment has as many beside each other as there are environments. So
what a fragment holds follows from the lineage and its number in it, and a successor continues without replaying.
"""

import functools
import time
from collections.abc import Mapping

import numpy as np

from rollout_worker.environments.seeding import SeedLineage
from rollout_worker.exploration.base import Exploration
from rollout_worker.sampling.action_trace import ActionTrace
from rollout_worker.sampling.sampler import Sample
from shared.datasets.recording import Recording
from shared.experience.spaces import Array
from shared.league.table import MatchTable
from shared.policies.policy import Policy


@functools.lru_cache(maxsize=2)
def _shuffled(lineage: SeedLineage, epoch: int, count: int) -> Array:
    generator = np.random.Generator(np.random.PCG64(lineage.shuffling(epoch)))
    return generator.permutation(count)


class DatasetSampler:
    """Does what `Sampler` does, but asks no policy and steps nothing."""

    def __init__(
        self, recording: Recording, policy_id: str, slots: int, lineage: SeedLineage, trace: ActionTrace | None = None
    ) -> None:
        """Begins `lineage`, or takes it up where a predecessor's trace ends."""
        self._recording, self._policy_id, self._slots, self.lineage = recording, policy_id, slots, lineage
        self._number = trace.number + 1 if trace else 0

    def sample(
        self, policies: Mapping[str, Policy], exploration: Mapping[str, Exploration], steps: int,
        table: MatchTable | None = None,
    ) -> Sample:  # fmt: skip
        """The next fragment; how anything would be acted does not matter."""
        started = time.perf_counter()
        count = self._recording.pieces(steps)
        places = range(self._number * self._slots, (self._number + 1) * self._slots)
        pieces = [int(_shuffled(self.lineage, place // count, count)[place % count]) for place in places]
        columns, episodes = self._recording.cut(pieces, steps)
        self._number += 1
        return Sample({self._policy_id: columns}, tuple(episodes), time.perf_counter() - started, 0.0)

    @property
    def position_digest(self) -> str:
        """A successor that reads the same dataset comes to the same place."""
        return self._recording.sha256

    def traced(self, sample: Sample) -> ActionTrace:
        """The last sample's part of the trace: no episode has to be acted again."""
        columns = sample.columns[self._policy_id]
        names = self._recording.spaces.action.column_names("action")
        actions = {self._policy_id: {name: columns[name][:0] for name in names}}
        nothing = (0,) * self._slots
        return ActionTrace(nothing, nothing, actions, self.lineage, self._number - 1, self.position_digest)

    def close(self) -> None:
        """Nothing runs."""
