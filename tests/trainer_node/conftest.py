"""The small run that the trainer's tests play with, data to learn from, and one thread for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stagecoach.shared.config.run_config import Config
from tests.conftest import RedisServer
from tests.support.experience.cartpole_data import played, write_played
from tests.support.learning.threads import one_thread
from tests.support.runs.game import Game, NewGame, make_game


@pytest.fixture
def new_game(redis_server: RedisServer, tmp_path: Path) -> Iterator[NewGame]:
    """`new_game(config)` → a new run on the shared Redis, trainer and worker started."""
    games: list[Game] = []

    def make(config: Config) -> Game:
        games.append(make_game(redis_server, tmp_path, config))
        return games[-1]

    yield make
    for game in games:
        game.end()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Six short episodes of CartPole."""
    path = tmp_path / "balanced.csv"
    write_played(path, played(6, greed=0.8, steps=50))
    return path


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As a trainer has it by default; on a busy machine, threads of small sums mostly wait for each other."""
    with one_thread():
        yield
