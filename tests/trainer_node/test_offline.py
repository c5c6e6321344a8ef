"""A run that learns from recorded experience: the same log, the same accounting, the same exact resume as any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stagecoach.shared.base.errors import DatasetError
from stagecoach.shared.config.loading import parse_config
from stagecoach.shared.config.recorded import DatasetConfig
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.datasets.read import read_dataset
from stagecoach.shared.experience import fragment
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.experience.log_entry import START
from stagecoach.shared.storage.log_archive import Archive
from stagecoach.shared.storage.metric_log import TRAIN
from tests.support.runs.game import NewGame, balanced, goes_on_exactly, small
from tests.support.runs.metric_rows import recorded as recorded_rows


def offline(path: Path, **sections: Any) -> Config:
    cloning = {"name": "bc", "minibatch_size": 16}
    return small(**{"dataset": {"path": str(path)}, "algorithm": cloning, "stop_at": {"updates": 8}} | sections)


def test_dataset_worker_pushes_recorded_fragments(new_game: NewGame, data: Path) -> None:
    game = new_game(offline(data, heatup="64 env_steps"))
    recorded = read_dataset(DatasetConfig(path=str(data)), game.role.description())["default"]
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


def test_off_policy_evaluation_changes_no_weight(new_game: NewGame, data: Path) -> None:
    estimated = {"path": str(data), "evaluation": {"every_updates": 4, "gradient_steps": 5}}
    game = new_game(offline(data, dataset=estimated))
    game.play_to(8)
    game.trainer.recorder.store()
    rows = recorded_rows(game.role.checkpoints.store, TRAIN)
    told = [{name for name in row if name.startswith("ope/")} for _, row in rows]
    assert [len(names) for names in told] == [0, 0, 0, 7, 0, 0, 0, 7]
    silent = new_game(offline(data, dataset={"path": str(data), "evaluation": {"every_updates": 0}}))
    assert game.finish() == silent.finish()


def first_the_data(path: Path, **sections: Any) -> Config:
    """A replay buffer that begins with 96 recorded steps; from then on the worker acts."""
    learning = {
        "name": "dqn", "minibatch_size": 16, "gradient_steps_per_env_step": 0.1, "target_update_steps": 5,
        "replay_buffer": {"kind": "uniform", "capacity": 160},
    }  # fmt: skip
    recorded = {"path": str(path), "only_heatup": True}
    return offline(path, dataset=recorded, algorithm=learning, heatup="96 env_steps", **sections)


def test_replay_buffer_starts_with_dataset_before_acting(new_game: NewGame, data: Path) -> None:
    game = new_game(first_the_data(data, archive="all"))
    known = {
        row.tobytes()
        for row in read_dataset(DatasetConfig(path=str(data)), game.role.description())["default"].columns["obs"]
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


def test_replay_buffer_with_dataset_is_restored_exactly(new_game: NewGame, data: Path) -> None:
    goes_on_exactly(new_game, first_the_data(data, archive="all"))


def test_dataset_evaluation_can_be_disabled(data: Path) -> None:
    made = offline(
        data, algorithm="dqn", dataset={"path": str(data), "evaluation": {"every_updates": 0, "episodes": 5}}
    )
    assert parse_config(made.model_dump(mode="json")) == made, "as roles read it, with every field"


def test_worker_refuses_changed_dataset(new_game: NewGame, data: Path) -> None:
    recorded = read_dataset(DatasetConfig(path=str(data)), new_game(offline(data)).role.description())["default"]
    config = offline(data, dataset={"path": str(data), "sha256": recorded.sha256})
    new_game(config).play_to(1)
    lines = data.read_text().splitlines()
    data.write_text("\n".join(lines[:-1]))
    with pytest.raises(DatasetError, match=r"has the SHA-256 .*restore the data, or start a new run"):
        new_game(config)
