"""Dataset sampler: each epoch takes every piece once, and a successor continues."""

from __future__ import annotations

import numpy as np

from stagecoach.rollout_worker.environments.seeding import SeedLineage
from stagecoach.rollout_worker.sampling import action_trace
from stagecoach.rollout_worker.sampling.dataset_sampler import DatasetSampler
from stagecoach.rollout_worker.sampling.sampler import Sample
from stagecoach.shared.datasets.recording import Recording, Recordings
from tests.support.environments.stage import same
from tests.support.experience.datasets import described, episodes

LIFE = SeedLineage(1, 0, 0, 0)


def recording() -> Recording:
    """41 steps: eleven pieces, the last one of a single step."""
    spaces = described().policies["default"]
    return Recording(spaces, episodes(spaces, (5, 1, 7, 4, 9, 15), "tTtctT"), "memory")


def of_data(life: SeedLineage = LIFE, past: action_trace.ActionTrace | None = None) -> DatasetSampler:
    return DatasetSampler(Recordings(default=recording()), described(), 3, life, past)


def sampled(source: DatasetSampler, count: int) -> list[Sample]:
    return [source.sample({}, {}, 4) for _ in range(count)]


def firsts(samples: list[Sample]) -> list[int]:
    """Returns the piece in each slot, identified by its first observation."""
    spaces = [recording().cut([piece], 4)[0]["obs"][0, 0] for piece in range(recording().pieces(4))]
    observed = [row for sample in samples for row in sample.columns["default"]["obs"][0]]
    return [next(n for n, first in enumerate(spaces) if np.array_equal(first, row)) for row in observed]


def test_epoch_takes_each_piece_once_in_own_order() -> None:
    pieces = firsts(sampled(of_data(), 11))
    epochs = [pieces[start : start + 11] for start in (0, 11, 22)]
    assert all(sorted(epoch) == list(range(11)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_dataset_order_follows_lineage() -> None:
    lives = [SeedLineage(*numbers, 0) for numbers in ((1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1))]
    orders = [tuple(firsts(sampled(of_data(life), 4))) for life in lives]
    assert len(set(orders)) == 4
    assert tuple(firsts(sampled(of_data(), 4))) == orders[0]


def test_dataset_sample_has_records_of_ended_episodes() -> None:
    returns = sorted(record.episode_return for sample in sampled(of_data(), 11) for record in sample.episodes)
    known = [record.episode_return for record in recording().records if record is not None]
    assert returns == sorted(known * 3), "three epochs; that of the episode that was cut off is not known"


def test_dataset_successor_continues() -> None:
    source = of_data()
    for _ in range(6):
        step = source.traced(sampled(source, 1)[0])
        assert step.fragments == 1
        past = action_trace.read([action_trace.encode(step)])
        assert past is not None
        successor = of_data(past.lineage, past)
        assert successor.position_digest == past.digest
        ahead = of_data(past.lineage, past)
        assert same(sampled(successor, 2)[1], sampled(ahead, 2)[1])
        assert firsts(sampled(of_data(past.lineage, past), 1)) == firsts(sampled(of_data(), past.number + 2)[-1:])
