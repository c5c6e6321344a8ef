"""A run that learns from recorded experience: the same log, the same books, the same exact resume as any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from shared import fragment
from shared.archive import Archive
from shared.config import Config
from shared.config_sources import parse_config
from shared.dataset_config import DatasetConfig
from shared.datasets.reading import read_dataset
from shared.errors import ConfigError, DatasetError
from shared.experience_log import START
from shared.redis_keys import RunKeys
from shared.steps import Phase
from tests.balancing import played, write_played
from tests.trainer_node.game import NewGame, balanced, small


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Six short episodes of CartPole."""
    path = tmp_path / "balanced.csv"
    write_played(path, played(6, greed=0.8, steps=50))
    return path


def offline(path: Path, **sections: Any) -> Config:
    cloning = {"name": "bc", "minibatch_size": 16}
    return small(**{"dataset": {"path": str(path)}, "algorithm": cloning, "stop_at": {"updates": 8}} | sections)


def test_a_worker_pushes_what_the_trainer_takes(new_game: NewGame, data: Path) -> None:
    game = new_game(offline(data, heatup="64 env_steps"))
    recorded = read_dataset(DatasetConfig(path=str(data)), game.role.description())
    assert [game.worker.step(0), game.worker.step(0)] == ["pushed", "pushed"]
    sent = [fragment.decode(entry.fragment or b"") for entry in game.role.log().read(START, 100, 0)]
    assert {item.header.phase for item in sent} == {Phase.HEATUP} and len(sent) == 2
    known = {row.tobytes() for row in recorded.columns["obs"]}
    for item in sent:
        fragment.check(item, game.role.run_id, game.role.description())
        rows = item.columns["default"]["obs"].reshape(-1, 4)
        assert {row.tobytes() for row in rows} <= known
        assert (item.columns["default"]["log_prob"][item.columns["default"]["mask"]] < 0).all(), "from the data"
    game.finish()
    balanced(game)


def test_the_whole_run_dies_at_every_version_and_the_weights_are_the_same(new_game: NewGame, data: Path) -> None:
    expected = new_game(offline(data)).finish()
    game = new_game(offline(data))
    game.lose_at(range(1, 8))
    assert game.finish() == expected
    assert "begins new episodes" not in game.events("environment")
    balanced(game)
    assert new_game(offline(data, seed=2)).finish() != expected


def test_what_the_policy_is_worth_is_estimated_and_changes_nothing(new_game: NewGame, data: Path) -> None:
    estimated = {"path": str(data), "evaluation": {"every_updates": 4, "gradient_steps": 5}}
    game = new_game(offline(data, dataset=estimated))
    rows = []
    for version in range(1, 9):
        game.play_to(version)
        rows.append(json.loads(cast(bytes, game.role.redis.get(RunKeys(game.role.run_id).signals))))
    told = [{name for name in row if name.startswith("ope/")} for row in rows]
    assert [len(names) for names in told] == [0, 0, 0, 7, 0, 0, 0, 7]
    silent = new_game(offline(data, dataset={"path": str(data), "evaluation": {"every_updates": 0}}))
    assert game.finish() == silent.finish()


def first_the_data(path: Path, **sections: Any) -> Config:
    """A replay memory that begins with 96 recorded steps; from then on the worker acts."""
    learning = {
        "name": "dqn", "minibatch_size": 16, "gradient_steps_per_env_step": 0.1, "target_update_steps": 5,
        "memory": {"kind": "uniform", "capacity": 160},
    }  # fmt: skip
    recorded = {"path": str(path), "only_heatup": True}
    return offline(path, dataset=recorded, algorithm=learning, heatup="96 env_steps", **sections)


def test_a_memory_begins_with_what_is_recorded_and_then_the_worker_acts(new_game: NewGame, data: Path) -> None:
    game = new_game(first_the_data(data, archive="all"))
    known = {
        row.tobytes() for row in read_dataset(DatasetConfig(path=str(data)), game.role.description()).columns["obs"]
    }
    game.finish()
    archived = Archive(game.role.checkpoints.store, game.role.run_id).entries()
    sent = [fragment.decode(entry.fragment or b"") for entry in archived]
    phases = [item.header.phase for item in sent]
    assert Phase.HEATUP in phases and Phase.TRAIN in phases
    for item in sent:
        columns = item.columns["default"]
        recorded = {row.tobytes() for row in columns["obs"][columns["mask"]]} <= known
        assert recorded == (item.header.phase is Phase.HEATUP)
    assert len({item.header.life for item in sent}) == 2, "a life in the data, and one in environments"
    balanced(game)


def test_a_memory_that_began_with_what_is_recorded_is_restored_exactly(new_game: NewGame, data: Path) -> None:
    expected = new_game(first_the_data(data)).finish()
    game = new_game(first_the_data(data))
    game.lose_at(range(1, 8))
    assert game.finish() == expected
    assert "begins new episodes" not in game.events("environment")
    balanced(game)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"heatup": "0 env_steps"}, "dataset.only_heatup=true with heatup='0 env_steps'"),
        ({"algorithm": {"name": "bc", "minibatch_size": 16}}, "would clone what it acts itself"),
    ],
)
def test_data_for_nothing_are_refused(data: Path, change: dict[str, Any], said: str) -> None:
    sections = {"dataset": {"path": str(data), "only_heatup": True}, "heatup": "96 env_steps"}
    with pytest.raises(ConfigError, match=said):
        offline(data, **{"algorithm": {"name": "dqn"}} | sections | change)


@pytest.mark.parametrize("algorithm", ["dqn", "rainbow", "td3", "ddpg"])
def test_an_evaluation_that_would_do_nothing_is_refused(data: Path, algorithm: str) -> None:
    def made(**evaluation: int) -> Config:
        environment = {"id": "CartPole-v1" if algorithm in ("dqn", "rainbow") else "Pendulum-v1", "num_envs": 4}
        recorded = {"path": str(data), "evaluation": evaluation}
        return offline(data, environment=environment, algorithm={"name": algorithm}, dataset=recorded)

    for evaluation in ({"every_updates": 10}, {"episodes": 5}):
        with pytest.raises(ConfigError, match=f"dataset.evaluation compares .*algorithm.name={algorithm} has none"):
            made(**evaluation)
    made(every_updates=0, episodes=5)
    assert parse_config(made().model_dump(mode="json")) == made(), "as roles read it, with every field"


def test_a_worker_whose_dataset_is_another_refuses_to_begin(new_game: NewGame, data: Path) -> None:
    recorded = read_dataset(DatasetConfig(path=str(data)), new_game(offline(data)).role.description())
    config = offline(data, dataset={"path": str(data), "sha256": recorded.sha256})
    new_game(config).play_to(1)
    lines = data.read_text().splitlines()
    data.write_text("\n".join(lines[:-1]))
    with pytest.raises(DatasetError, match=r"has the SHA-256 .*bring back what was there, or start a new run"):
        new_game(config)
