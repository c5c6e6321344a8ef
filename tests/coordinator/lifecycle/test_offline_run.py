"""A run that learns from recorded experience, made, refused and resumed as a person does it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from stagecoach.coordinator.run_access.run import Run
from stagecoach.shared.base.errors import DatasetError, UserError
from stagecoach.shared.config.run_config import Config
from tests.support.experience.cartpole_data import played, write_played
from tests.support.processes.command_line import Stagecoach, check_refused

pytestmark = pytest.mark.timeout(180)
MakeConfig = Callable[..., Config]


ALGORITHMS: dict[str, dict[str, Any]] = {
    "dataset": {"name": "bc"},
    "demonstrations": {"behavioral_cloning": {"strength": 0.5, "minibatch_size": 16}},
}


def learning_from(section: str, config: MakeConfig, **dataset: Any) -> MakeConfig:
    return partial(config, **{section: dataset}, algorithm={"minibatch_size": 32} | ALGORITHMS[section])


@pytest.mark.parametrize("section", ALGORITHMS)
def test_recorded_data_hash_is_part_of_run(tmp_path: Path, section: str, config: MakeConfig) -> None:
    make = learning_from(section, config, path=str(tmp_path / "balanced.csv"))
    write_played(tmp_path / "balanced.csv", played(4, steps=40))
    run = Run.start(make(), "a", inline=True)
    assert run.wait(120).reason == "exhausted"
    kept = yaml.safe_load((run.folder.path / "config.yaml").read_text())[section]
    assert len(kept["sha256"]) == 64 and getattr(run.config, section).sha256 == kept["sha256"]
    assert Run.start(make(), "a", inline=True, or_resume=True).ended, "the same data are the same run"

    (tmp_path / "balanced.csv").rename(tmp_path / "moved.csv")
    here, moved = (f"{section}.path={tmp_path / name}" for name in ("balanced.csv", "moved.csv"))
    assert Run.resume("a", tmp_path / "runs", (moved, "stop_at.updates=6"), inline=True).wait(120).status.updates == 6

    write_played(tmp_path / "balanced.csv", played(5, steps=40))
    with pytest.raises(DatasetError, match=rf"has the SHA-256 .*\({section}.sha256\)"):
        Run.resume("a", tmp_path / "runs", (here, "stop_at.updates=9"), inline=True)
    with pytest.raises(UserError, match="cannot change in a resume, because it decides the learning"):
        Run.start(make(), "a", inline=True, or_resume=True)


ODD = "obs.0,action,reward,terminated\n0,1,1,1\n"


@pytest.mark.parametrize(
    ("section", "changes", "words"),
    [
        ("dataset", {"path": "odd.csv"}, ["odd.csv has no column obs.1"]),
        ("demonstrations", {"path": "odd.csv"}, ["odd.csv has no column obs.1"]),
        ("demonstrations", {"path": "nowhere.csv"}, ["demonstrations.path=", "nowhere.csv", "does not exist"]),
        ("demonstrations", {"min_return": 400.0}, ["demonstrations.min_return=400", "returned 40"]),
    ],
)
def test_unusable_recording_is_refused_before_writing(
    stagecoach: Stagecoach, tmp_path: Path, config: MakeConfig, section: str, changes: dict[str, Any], words: list[str]
) -> None:
    write_played(tmp_path / "balanced.csv", played(4, steps=40))
    (tmp_path / "odd.csv").write_text(ODD)
    made = learning_from(section, config, **{"path": "balanced.csv"} | changes)()
    (tmp_path / "learning.yaml").write_text(yaml.safe_dump(made.model_dump(mode="json", exclude_unset=True)))
    check_refused(stagecoach("train", "learning.yaml", "--run-id", "a"), *words)
    assert not (tmp_path / "runs").exists()
