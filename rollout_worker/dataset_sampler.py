"""Recorded experience in place of environments: fragments of pieces of a dataset, shuffled, without end.

The dataset is cut into pieces of a fragment's steps. In each epoch all of them are taken once, in an order that follows
from the worker's life and the epoch; a fragment has as many beside each other as there are environments. So what a
fragment holds follows from the life and its number in it, and a successor goes on without doing anything again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from rollout_worker import trail
from rollout_worker.exploration import Exploration
from rollout_worker.sampler import Sample
from rollout_worker.trail import Life, Trail
from shared.datasets.recording import Recording
from shared.policies.policy import Policy
from shared.spaces import Array


class DatasetSampler:
    """Does what `Sampler` does, but asks no policy and steps nothing."""

    def __init__(self, recording: Recording, policy_id: str, slots: int, life: Life, past: Trail | None = None) -> None:
        """Begins `life`; or takes it up where a predecessor's trail ends."""
        self._recording = recording
        self._policy_id = policy_id
        self._slots = slots
        self.life = life
        self._number = past.number if past else 0
        self._order: tuple[tuple[int, int], Array] = (-1, -1), np.zeros(0, np.int64)
        """Of which epoch and number of pieces, and the pieces."""

    def sample(self, policies: Mapping[str, Policy], exploration: Exploration, steps: int) -> Sample:
        """The next fragment; how anything would be acted does not matter."""
        started = time.perf_counter()
        count = self._recording.pieces(steps)
        places = range(self._number * self._slots, (self._number + 1) * self._slots)
        pieces = [int(self._shuffled(place // count, count)[place % count]) for place in places]
        columns, episodes = self._recording.cut(pieces, steps)
        self._number += 1
        return Sample({self._policy_id: columns}, tuple(episodes), time.perf_counter() - started, 0.0)

    def _shuffled(self, epoch: int, count: int) -> Array:
        if self._order[0] != (epoch, count):
            generator = np.random.Generator(np.random.PCG64(self.life.shuffling(epoch)))
            self._order = (epoch, count), generator.permutation(count)
        return self._order[1]

    @property
    def stands(self) -> str:
        """A successor that reads the same dataset comes to the same place."""
        return self._recording.sha256

    def trace(self, sample: Sample) -> trail.Step:
        """The part of the trail that goes with the last sample: no episode has to be acted again."""
        columns = sample.columns[self._policy_id]
        names = self._recording.spaces.action.column_names("action")
        actions = {self._policy_id: {name: columns[name][:0] for name in names}}
        nothing = (0,) * self._slots
        return trail.Step(self.life, self._number - 1, nothing, nothing, self.stands, actions)

    def close(self) -> None:
        """Nothing runs."""
