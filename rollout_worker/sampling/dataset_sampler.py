"""Recorded experience in place of environments: fragments of pieces of a dataset, shuffled, without end.

The dataset is cut into pieces of a fragment's length. Each epoch takes every piece once, in an order that follows from
the worker's seed lineage and the epoch; a fragment has one piece per environment. So its content follows from the
lineage and its number, and a successor continues without replaying. Each of several policies has its own pieces, one
per slot of its agents; a policy that does not learn has none.
"""

import functools
from collections.abc import Mapping

import numpy as np

from stagecoach.rollout_worker.environments.seeding import SeedLineage
from stagecoach.rollout_worker.exploration.base import Exploration
from stagecoach.rollout_worker.sampling.action_trace import ActionTrace
from stagecoach.rollout_worker.sampling.director import Directors
from stagecoach.rollout_worker.sampling.sampler import Sample
from stagecoach.shared.base import world
from stagecoach.shared.datasets.recording import Recordings
from stagecoach.shared.experience.fragment import INFO, EpisodeRecord, expected_columns
from stagecoach.shared.experience.spaces import Array, Columns, EnvironmentDescription
from stagecoach.shared.policies.policy import Policy


@functools.lru_cache(maxsize=2)
def _shuffled(lineage: SeedLineage, epoch: int, count: int) -> Array:
    generator = np.random.Generator(np.random.PCG64(lineage.shuffling(epoch)))
    return generator.permutation(count)


class DatasetSampler:
    """Samples fragments as `Sampler` does, without a policy or environment."""

    directors = Directors()

    def __init__(
        self, recordings: Recordings, description: EnvironmentDescription, num_envs: int, lineage: SeedLineage,
        trace: ActionTrace | None = None,
    ) -> None:  # fmt: skip
        """Begins `lineage`, or resumes it at the end of a predecessor's trace."""
        self._recordings, self._description, self._envs, self.lineage = recordings, description, num_envs, lineage
        self._number = trace.number + 1 if trace else 0

    def sample(self, policies: Mapping[str, Policy], exploration: Mapping[str, Exploration], steps: int) -> Sample:
        started = world.monotonic()
        columns: dict[str, Columns] = {}
        episodes: list[EpisodeRecord] = []
        for policy_id, spaces in self._description.policies.items():
            slots = self._envs * self._description.slots(policy_id)
            if (recording := self._recordings.get(policy_id)) is None:
                expected = expected_columns(spaces, steps, slots, info_columns=self._description.info_columns)
                columns[policy_id] = {
                    name: np.full([max(size, 0) for size in shape], np.nan if name.startswith(INFO) else 0, dtype)
                    for name, (shape, dtype) in expected.items()
                }
                continue
            count = recording.pieces(steps)
            places = range(self._number * slots, (self._number + 1) * slots)
            pieces = [int(_shuffled(self.lineage, place // count, count)[place % count]) for place in places]
            columns[policy_id], ended = recording.cut(pieces, steps)
            episodes += ended
        self._number += 1
        return Sample(columns, tuple(episodes), steps * self._envs, world.monotonic() - started, 0.0)

    @property
    def position_digest(self) -> str:
        return self._recordings.sha256

    def traced(self, sample: Sample) -> ActionTrace:
        actions = {
            policy_id: {name: sample.columns[policy_id][name][:0] for name in spaces.action.column_names("action")}
            for policy_id, spaces in self._description.policies.items()
        }
        nothing = (0,) * self._envs
        return ActionTrace(nothing, nothing, actions, self.lineage, self._number - 1, self.position_digest)

    def close(self) -> None:
        """No-op: no environment runs."""
