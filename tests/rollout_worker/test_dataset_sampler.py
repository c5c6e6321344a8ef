"""Recorded experience in place of environments: what comes in which order, and that a successor goes on exactly."""

from __future__ import annotations

import numpy as np

from rollout_worker import trail
from rollout_worker.dataset_sampler import DatasetSampler
from rollout_worker.exploration import RandomActing
from rollout_worker.sampler import Sample
from rollout_worker.trail import Life
from shared.datasets.recording import Recording
from tests.shared.datasets import described, episodes

LIFE = Life(1, 0, 0, 0)
STEPS, SLOTS = 4, 3


def recording() -> Recording:
    """41 steps: eleven pieces, the last one of a single step."""
    spaces = described().policies["default"]
    return Recording(spaces, episodes(spaces, (5, 1, 7, 4, 9, 15), "tTtctT"), "memory")


def sampler(life: Life = LIFE, past: trail.Trail | None = None) -> DatasetSampler:
    return DatasetSampler(recording(), "default", SLOTS, life, past)


def sampled(source: DatasetSampler, count: int) -> list[Sample]:
    return [source.sample({}, RandomActing(), STEPS) for _ in range(count)]


def firsts(samples: list[Sample]) -> list[int]:
    """Which piece each slot holds, by its first observation."""
    spaces = [recording().cut([piece], STEPS)[0]["obs"][0, 0] for piece in range(recording().pieces(STEPS))]
    observed = [row for sample in samples for row in sample.columns["default"]["obs"][0]]
    return [next(n for n, first in enumerate(spaces) if np.array_equal(first, row)) for row in observed]


def same(one: Sample, other: Sample) -> bool:
    mine, theirs = one.columns["default"], other.columns["default"]
    return one.episodes == other.episodes and all(np.array_equal(mine[name], theirs[name]) for name in mine)


def test_each_epoch_takes_every_piece_once_in_an_order_of_its_own() -> None:
    pieces = firsts(sampled(sampler(), 11))
    epochs = [pieces[start : start + 11] for start in (0, 11, 22)]
    assert all(sorted(epoch) == list(range(11)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_each_life_has_its_own_order_and_keeps_it() -> None:
    lives = [LIFE, Life(2, 0, 0, 0), Life(1, 1, 0, 0), Life(1, 0, 1, 0)]
    orders = [tuple(firsts(sampled(sampler(life), 4))) for life in lives]
    assert len(set(orders)) == 4
    assert tuple(firsts(sampled(sampler(), 4))) == orders[0]


def test_the_records_are_those_of_the_episodes_that_end() -> None:
    returns = sorted(record.episode_return for sample in sampled(sampler(), 11) for record in sample.episodes)
    known = [record.episode_return for record in recording().records if record is not None]
    assert returns == sorted(known * 3), "three epochs; that of the episode that was cut off is not known"


def test_a_successor_goes_on_where_its_predecessor_ended() -> None:
    source = sampler()
    for _ in range(6):
        step = source.trace(sampled(source, 1)[0])
        assert step.fragments == 1
        past = trail.read([trail.encode(step)])
        assert past is not None
        successor = sampler(past.life, past)
        assert successor.stands == past.digest
        ahead = sampler(past.life, past)
        assert same(sampled(successor, 2)[1], sampled(ahead, 2)[1])
        assert firsts(sampled(sampler(past.life, past), 1)) == firsts(sampled(sampler(), past.number + 1)[-1:])
