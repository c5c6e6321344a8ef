"""N updates in one go, and k updates, a death of whoever you like, and N − k more: the same SHA-256."""

from __future__ import annotations

import pytest

from shared.redis_keys import RunKeys
from tests.environments_for_tests import MODULE
from tests.trainer_node.game import NewGame, balanced, die, replace_worker, small

CONFIG = small(stop_at={"updates": 8}, environment={"id": "CartPole-v1", "num_envs": 3})


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """The hash of the undisturbed run, worked out once."""
    return {}


def undisturbed(new_game: NewGame, expected: dict[str, str]) -> str:
    """SHA-256 of the final policy when nothing happens."""
    if not expected:
        expected["sha"] = new_game(CONFIG).finish()
    return expected["sha"]


@pytest.mark.parametrize("at", [1, 3, 6])
@pytest.mark.parametrize("moment", ["after a push", "in the middle of a fragment", "while it waits"])
def test_a_worker_that_dies_is_succeeded_as_if_it_had_lived(
    new_game: NewGame, expected: dict[str, str], at: int, moment: str
) -> None:
    game = new_game(CONFIG)
    game.play_to(at)
    if moment == "after a push":
        assert game.worker.step(0) == "pushed"
    elif moment == "in the middle of a fragment":
        assert game.worker._claim(0).granted
        game.worker._sampler.sample(game.worker._policies, game.worker._exploration(), 5)
    else:
        while game.worker.step(0) == "pushed":
            pass
    die(game)
    replace_worker(game)
    assert game.finish() == undisturbed(new_game, expected)
    balanced(game)


def test_the_whole_run_dies_at_every_version_and_the_weights_are_the_same(
    new_game: NewGame, expected: dict[str, str]
) -> None:
    game = new_game(CONFIG)
    game.lose_at(range(1, 8))
    assert game.finish() == undisturbed(new_game, expected)
    assert game.worker.incarnation == 7
    balanced(game)


def test_with_no_time_to_catch_up_a_successor_begins_new_episodes(new_game: NewGame, expected: dict[str, str]) -> None:
    config = CONFIG.model_copy(update={"rollout": CONFIG.rollout.model_copy(update={"catch_up_seconds": 0.0})})
    game = new_game(config)
    game.play_to(2)
    die(game)
    replace_worker(game)
    assert game.finish() != undisturbed(new_game, expected)
    balanced(game)


def test_where_a_place_kills_again_and_again_new_episodes_begin(new_game: NewGame) -> None:
    game = new_game(CONFIG)
    game.play_to(2)
    lives = []
    for _ in range(5):
        assert game.worker._claim(0).granted
        game.worker._act()  # and dies of it
        die(game)
        replace_worker(game)
        lives.append(game.worker._sampler.life.incarnation)
    assert lives == [0, 0, 0, 4, 5], "three successors took it up, and none of them pushed anything"
    assert "worker-0 begins new episodes: 4 of its predecessors died in the old ones" in game.events("environment")
    game.finish()
    balanced(game)


def test_who_dies_while_it_waits_dies_of_nothing_in_its_episodes(new_game: NewGame, expected: dict[str, str]) -> None:
    game = new_game(CONFIG)
    game.play_to(2)
    for _ in range(6):
        die(game)
        replace_worker(game)
    assert game.finish() == undisturbed(new_game, expected)
    assert "begins new episodes" not in game.events("environment")


@pytest.mark.parametrize("heatup", ["0 env_steps", "100 env_steps"])
@pytest.mark.parametrize("pushes", [0, 1])
def test_a_run_that_dies_in_its_first_fragments_begins_as_it_began(new_game: NewGame, pushes: int, heatup: str) -> None:
    config = small(stop_at={"updates": 3}, heatup=heatup)
    whole = new_game(config).finish()
    game = new_game(config)
    for _ in range(2):
        for _ in range(pushes):
            assert game.worker.step(0) == "pushed"
        game.lose()
    assert game.finish() == whole
    balanced(game)


def test_an_environment_that_raises_now_and_then_does_so_in_every_life_alike(new_game: NewGame) -> None:
    stumbles = {"id": f"{MODULE}:Stumbles", "num_envs": 3, "failures_allowed": 9999}
    config = small(stop_at={"updates": 6}, environment=stumbles)
    undisturbed = new_game(config)
    whole = undisturbed.finish()
    assert undisturbed.events("environment").count("stumbled") > 5
    game = new_game(config)
    for version in range(1, 6):
        game.play_to(version)
        die(game)
        replace_worker(game)
    assert game.finish() == whole
    balanced(game)


def test_a_trail_that_is_gone_is_said_and_one_of_a_drained_worker_goes(new_game: NewGame) -> None:
    game = new_game(CONFIG)
    other = game.another_worker(1)
    keys = RunKeys(game.role.run_id)
    assert other.step(0) == "pushed"
    assert game.role.redis.exists(keys.trail("worker-1"))
    game.role.flow.drain("worker-1")
    assert other.step(0) == "end:drained"
    other.stop("drained")
    assert not game.role.redis.exists(keys.trail("worker-1"))
    game.role.flow.undrain("worker-1")
    assert game.another_worker(1)._sampler.life.incarnation == 1
    assert "worker-1 begins new episodes: no trail" in game.events("environment")
    game.finish()
    balanced(game)
