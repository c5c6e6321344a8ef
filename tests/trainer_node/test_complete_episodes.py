"""Fragments that end where episodes do, from the sampler to a run that is resumed and replayed; acting in warm-up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stagecoach.rollout_worker.acting_policies import make_exploration
from stagecoach.rollout_worker.exploration.base import RandomActing
from stagecoach.shared.experience.counters import Phase
from tests.conftest import minimal_config
from tests.support.environments.small import MODULE
from tests.support.environments.stage import Stage, same
from tests.support.runs.game import NewGame, archived, goes_on_exactly

WHOLE = {"complete_episodes": True, "fragment_steps": 8, "fragments_per_update": 2}
CART = {"id": "CartPole-v1", "num_envs": 3, "max_episode_steps": 40}


def lengths(vectorization: str = "sync", most: int = 10) -> Stage:
    """Three environments whose episodes take 2, 3 … steps more than a seed, at most `most`."""
    environment = {"id": f"{MODULE}:Counting", "num_envs": 3, "kwargs": {"length": 4, "ends": "truncated"}}
    rollout = {"complete_episodes": True, "fragment_steps": 6}
    return Stage(environment | {"vectorization": vectorization, "max_episode_steps": most}, rollout=rollout)


def test_fragment_holds_whole_episodes_and_the_rest_is_empty() -> None:
    stage = lengths()
    for episode in (0, 2):
        sample = stage.sample(6)
        columns = sample.columns["default"]
        assert columns["mask"].sum(axis=0).tolist() == [8, 8, 8], "two episodes of four steps, the second one finished"
        assert columns["truncated"].nonzero()[0].tolist() == [3, 3, 3, 7, 7, 7]
        assert columns["obs"][:8, 0].tolist() == [[step, episode + more] for more in (0, 1) for step in range(4)]
        assert len(columns["mask"]) == 6 + 10 - 1 and not columns["obs"][8:].any()
        assert sample.transitions == 24 and len(sample.episodes) == 6


def test_environments_wait_for_the_longest_episode() -> None:
    environment = {"id": f"{MODULE}:LengthOfSeed", "num_envs": 3, "max_episode_steps": 9}
    stage = Stage(environment, seed=5, rollout={"complete_episodes": True, "fragment_steps": 2})
    for _ in range(3):
        sample = stage.sample(2)
        mask, over = (sample.columns["default"][name] for name in ("mask", "truncated"))
        over = over | sample.columns["default"]["terminated"]
        for slot in range(3):
            acted = int(mask[:, slot].sum())
            assert mask[:acted, slot].all() and over[acted - 1, slot]
        assert sample.transitions == mask.sum() == sum(record.length for record in sample.episodes)


def test_environments_in_processes_wait_alike() -> None:
    there, here = lengths("async"), lengths("sync")
    try:
        for _ in range(2):
            assert same(there.sample(6), here.sample(6))
    finally:
        there.sampler.close()


def test_episodes_are_those_of_fragments_that_cut_them() -> None:
    environment = {"id": "CartPole-v1", "num_envs": 1, "max_episode_steps": 30}
    whole = Stage(environment, rollout={"complete_episodes": True, "fragment_steps": 20})
    cut = Stage(environment)
    starts = [
        {tuple(row) for sample in samples for row in _first_rows(sample.columns["default"])}
        for samples in ([whole.sample(20) for _ in range(3)], [cut.sample(20) for _ in range(9)])
    ]
    assert len(starts[0]) >= 3 and starts[0] <= starts[1], "each begins from the same seeds"


def _first_rows(columns: dict[str, Any]) -> list[Any]:
    over = columns["terminated"] | columns["truncated"]
    first = np.concatenate([[True], over[:-1, 0]]) & columns["mask"][:, 0]
    return list(columns["obs"][first, 0])


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"policies": {"default": {"core": "lstm", "share_encoder": True}}, "algorithm": {"minibatch_size": 48}},
        {"algorithm": {"name": "dqn", "replay_buffer": {"kind": "uniform", "capacity": 2000}}},
        {"rollout": WHOLE | {"max_policy_lag": 1}, "algorithm": {"name": "appo", "minibatch_size": 16}},
    ],
    ids=["ppo", "lstm", "dqn", "appo"],
)
def test_run_resumes_and_replays_bit_equal(new_game: NewGame, sections: dict[str, Any]) -> None:
    config = archived(**({"stop_at": {"updates": 4}, "environment": CART, "rollout": WHOLE} | sections))
    finished = goes_on_exactly(new_game, config).finished()
    counters = finished["counters"]
    acted = sum(counters[phase]["env_steps"] for phase in ("heatup", "train"))
    assert finished["ledger"]["worker-0"]["consumed"]["transitions"] == acted, "the ledger counts steps, not empty rows"


def test_warm_up_acts_by_the_policy_when_asked(new_game: NewGame) -> None:
    found = {}
    for acting in ("random", "policy"):
        config = archived(stop_at={"updates": 2}, heatup={"duration": "100 env_steps", "acting": acting})
        game = new_game(config)
        assert game.worker.policies.phase is Phase.HEATUP
        found[acting] = game.worker.policies.exploration()["default"]
        game.finish()
    assert isinstance(found["random"], RandomActing) and not isinstance(found["policy"], RandomActing)
    expected = make_exploration(minimal_config().algorithm.acting, game.trainer.learner.counters.train)
    assert type(found["policy"]) is type(expected)


def test_heatup_accepts_a_duration() -> None:
    short, long, other = (
        minimal_config(heatup=heatup)
        for heatup in ("64 env_steps", {"duration": "64 env_steps"}, {"duration": "64 env_steps", "acting": "policy"})
    )
    assert short.hash() == long.hash() != other.hash()
    assert minimal_config(algorithm={"name": "sac"}, heatup={"acting": "policy"}).heatup.duration.amount == 1000
