"""A run that learns from recorded experience, made, refused and resumed as a person does it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.run import Run
from shared.config.run_config import Config
from shared.errors import DatasetError, UserError
from tests.support.cartpole_data import played, write_played
from tests.support.command_line import Stagecoach, check_refused

pytestmark = pytest.mark.timeout(180)


MakeConfig = Callable[..., Config]


@pytest.fixture
def imitating(config: MakeConfig, tmp_path: Path) -> MakeConfig:
    cloning = {"minibatch_size": 32, "behavioral_cloning": {"strength": 0.5, "minibatch_size": 16}}
    demonstrations = {"path": str(tmp_path / "balanced.csv")}
    return partial(config, demonstrations=demonstrations, algorithm=cloning)


@pytest.fixture
def offline(config: MakeConfig, tmp_path: Path) -> MakeConfig:
    cloning = {"name": "bc", "minibatch_size": 32}
    return partial(config, dataset={"path": str(tmp_path / "balanced.csv")}, algorithm=cloning)


@pytest.mark.parametrize("section", ["dataset", "demonstrations"])
def test_the_hash_of_what_was_recorded_is_part_of_the_run(
    tmp_path: Path, section: str, offline: MakeConfig, imitating: MakeConfig
) -> None:
    make = offline if section == "dataset" else imitating
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


def test_a_dataset_that_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path, offline: MakeConfig) -> None:
    (tmp_path / "odd.csv").write_text("obs.0,action,reward,terminated\n0,1,1,1\n")
    with pytest.raises(DatasetError, match=r"odd.csv has no column obs.1"):
        Run.start(offline(dataset={"path": str(tmp_path / "odd.csv")}), "a", inline=True)
    assert not (tmp_path / "runs").exists()


WRONG: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no file": ({"demonstrations": {"path": "nowhere.csv"}}, ("demonstrations.path=", "nowhere.csv", "does not exist")),
    "other spaces": ({"environment": {"id": "Acrobot-v1"}}, ("balanced.csv", "obs.4")),
    "none is good enough": (
        {"demonstrations": {"path": "balanced.csv", "min_return": 400.0}},
        ("demonstrations.min_return=400", "returned 40"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_demonstrations_that_cannot_be_imitated_are_refused_with_exit_2(
    stagecoach: Stagecoach, tmp_path: Path, imitating: MakeConfig, case: str
) -> None:
    sections, words = WRONG[case]
    write_played(tmp_path / "balanced.csv", played(4, steps=40))
    config = imitating(**sections).model_dump(mode="json", exclude_unset=True)
    (tmp_path / "imitating.yaml").write_text(yaml.safe_dump(config))
    check_refused(stagecoach("train", "imitating.yaml", "--run-id", "a"), *words)
    assert not (tmp_path / "runs").exists()
