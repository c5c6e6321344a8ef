"""Seeds of workers, fragments and episodes."""

from __future__ import annotations

import pytest

from stagecoach.rollout_worker.environments.seeding import SeedLineage, episode_seed
from tests.support.environments.small import MODULE
from tests.support.environments.stage import Stage


def test_seeds_differ_by_life_fragment_and_episode() -> None:
    lives = [
        SeedLineage(*numbers) for numbers in ((1, 0, 0, 0), (2, 0, 0, 0), (1, 1, 0, 0), (1, 0, 1, 0), (1, 0, 0, 1))
    ]
    seeds = [life.acting(number) for life in lives for number in range(3)]
    seeds += [seed for life in lives for seed in life.environments(4)]
    seeds += [episode_seed(lives[0].environments(1)[0], number) for number in range(1, 4)]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_episode_seeds_fit_older_generators(vectorization: str) -> None:
    stage = Stage({"id": f"{MODULE}:OlderGenerator", "num_envs": 8, "vectorization": vectorization})
    drawn = [record.episode_return for record in stage.sample(40).episodes]
    stage.sampler.close()
    assert len(set(drawn)) == len(drawn) == 8 * 13, "and another one each"
