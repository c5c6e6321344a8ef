"""N updates in one go, and k updates, a death of whoever you like, and N − k more: the same SHA-256."""

from __future__ import annotations

import pytest

from stagecoach.shared.protocol.keys import RunKeys
from tests.conftest import RedisServer
from tests.support.environments.small import MODULE
from tests.support.runs.game import NewGame, balanced, die_in_a_fragment, make_game, small

CONFIG = small(stop_at={"updates": 8}, environment={"id": "CartPole-v1", "num_envs": 3})


@pytest.fixture(scope="module")
def undisturbed(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> str:
    """SHA-256 of the final policy when nothing happens."""
    game = make_game(redis_server, tmp_path_factory.mktemp("undisturbed"), CONFIG)
    try:
        return game.finish()
    finally:
        game.end()


@pytest.mark.parametrize("at", [1, 3, 6])
@pytest.mark.parametrize("moment", ["after a push", "in the middle of a fragment"])
def test_worker_death_changes_nothing(new_game: NewGame, undisturbed: str, at: int, moment: str) -> None:
    game = new_game(CONFIG)
    game.play_to(at)
    if moment == "after a push":
        assert game.worker.step(0) == "pushed"
    else:
        die_in_a_fragment(game)
    game.lose_worker()
    assert game.finish() == undisturbed
    balanced(game)


def test_death_with_native_environment_changes_nothing(new_game: NewGame) -> None:
    config = small(stop_at={"updates": 6}, environment={"id": "CartPole-v1", "num_envs": 3, "vectorization": "native"})
    whole = new_game(config).finish()
    game = new_game(config)
    for version in (1, 2, 4):
        game.play_to(version)
        die_in_a_fragment(game)
        game.lose_worker()
    assert game.finish() == whole
    assert "begins new episodes" not in game.events("environment")
    balanced(game)


def test_successor_without_catch_up_time_begins_new_episodes(new_game: NewGame, undisturbed: str) -> None:
    config = CONFIG.model_copy(update={"rollout": CONFIG.rollout.model_copy(update={"catch_up_seconds": 0.0})})
    game = new_game(config)
    game.play_to(2)
    game.lose_worker()
    assert game.finish() != undisturbed
    balanced(game)


def test_new_episodes_begin_after_repeated_deaths_in_one_place(new_game: NewGame) -> None:
    game = new_game(CONFIG)
    game.play_to(2)
    lives = []
    for _ in range(5):
        assert game.worker.claim(0).granted
        game.worker.act()  # and dies of it
        game.lose_worker()
        lives.append(game.worker.episodes.sampler.lineage.incarnation)
    assert lives == [0, 0, 0, 4, 5], "three successors took it up, and none of them pushed anything"
    assert "worker-0 begins new episodes: 4 of its predecessors died in the old episodes" in game.events("environment")
    game.finish()
    balanced(game)


def test_deaths_while_waiting_do_not_blame_episodes(new_game: NewGame, undisturbed: str) -> None:
    game = new_game(CONFIG)
    game.play_to(2)
    while game.worker.step(0) == "pushed":
        pass
    for _ in range(6):
        game.lose_worker()
    assert game.finish() == undisturbed
    assert "begins new episodes" not in game.events("environment")


@pytest.mark.parametrize("heatup", ["0 env_steps", "100 env_steps"])
@pytest.mark.parametrize("pushes", [0, 1])
def test_run_that_dies_in_first_fragments_restarts_exactly(new_game: NewGame, pushes: int, heatup: str) -> None:
    config = small(stop_at={"updates": 3}, heatup=heatup)
    whole = new_game(config).finish()
    game = new_game(config)
    for _ in range(2):
        for _ in range(pushes):
            assert game.worker.step(0) == "pushed"
        game.lose()
    assert game.finish() == whole
    balanced(game)


def test_environment_failures_repeat_in_every_life(new_game: NewGame) -> None:
    stumbles = {"id": f"{MODULE}:Stumbles", "num_envs": 3, "failures_allowed": 9999}
    config = small(stop_at={"updates": 6}, environment=stumbles)
    calm = new_game(config)
    whole = calm.finish()
    assert calm.events("environment").count("stumbled") > 5
    game = new_game(config)
    for version in range(1, 6):
        game.play_to(version)
        game.lose_worker()
    assert game.finish() == whole
    balanced(game)


def test_lost_action_trace_is_reported_and_drained_one_deleted(new_game: NewGame) -> None:
    game = new_game(CONFIG)
    other = game.another_worker(1)
    keys = RunKeys(game.role.run_id)
    assert other.step(0) == "pushed"
    assert game.role.redis.exists(keys.action_trace("worker-1"))
    game.role.flow.drain("worker-1")
    assert other.step(0) == "drained"
    other.stop("drained")
    assert not game.role.redis.exists(keys.action_trace("worker-1"))
    game.role.flow.undrain("worker-1")
    assert game.another_worker(1).episodes.sampler.lineage.incarnation == 1
    assert "worker-1 begins new episodes: its predecessor left no action trace" in game.events("environment")
    game.finish()
    balanced(game)
