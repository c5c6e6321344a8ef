"""A run that learns from recorded experience, made, refused and resumed as a person does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.run import Run
from shared.config import Config
from shared.errors import DatasetError, UserError
from tests.balancing import played, write_played
from tests.conftest import minimal_config
from tests.coordinator.terminal import Stagecoach, check_refused

pytestmark = pytest.mark.timeout(180)


def offline(folder: Path, name: str = "balanced.csv") -> Config:
    dataset, cloning = {"path": str(folder / name)}, {"name": "bc", "minibatch_size": 32}
    return minimal_config(
        runs_dir=str(folder / "runs"), dataset=dataset, rollout=ROLLOUT, algorithm=cloning, evaluation={"episodes": 1}
    )


ROLLOUT = {"workers": 1, "fragment_steps": 8, "fragments_per_update": 2}


def test_the_datasets_hash_is_part_of_the_run(tmp_path: Path) -> None:
    write_played(tmp_path / "balanced.csv", played(4, steps=40))
    run = Run.start(offline(tmp_path), "a", inline=True)
    assert run.wait(120).reason == "exhausted"
    kept = yaml.safe_load((run.folder.path / "config.yaml").read_text())["dataset"]
    assert len(kept["sha256"]) == 64 and run.config.dataset is not None and run.config.dataset.sha256 == kept["sha256"]
    assert Run.start(offline(tmp_path), "a", inline=True, or_resume=True).ended, "the same data are the same run"

    (tmp_path / "balanced.csv").rename(tmp_path / "moved.csv")
    moved = (f"dataset.path={tmp_path / 'moved.csv'}", "stop_at.updates=6")
    assert Run.resume("a", tmp_path / "runs", moved, inline=True).wait(120).status.updates == 6

    write_played(tmp_path / "balanced.csv", played(5, steps=40))
    with pytest.raises(DatasetError, match="has the SHA-256"):
        Run.resume(
            "a", tmp_path / "runs", (f"dataset.path={tmp_path / 'balanced.csv'}", "stop_at.updates=9"), inline=True
        )
    with pytest.raises(UserError, match="cannot change in a resume, because it decides the learning"):
        Run.start(offline(tmp_path), "a", inline=True, or_resume=True)


def test_a_dataset_that_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "odd.csv").write_text("obs.0,action,reward,terminated\n0,1,1,1\n")
    with pytest.raises(DatasetError, match=r"odd.csv has no column obs.1"):
        Run.start(offline(tmp_path, "odd.csv"), "a", inline=True)
    assert not (tmp_path / "runs").exists()


def imitating(folder: Path, name: str = "balanced.csv", **sections: Any) -> Config:
    cloning = {"minibatch_size": 32, "behavioural_cloning": {"strength": 0.5, "minibatch_size": 16}}
    return minimal_config(
        **({
            "runs_dir": str(folder / "runs"), "demonstrations": {"path": str(folder / name)}, "rollout": ROLLOUT,
            "algorithm": cloning, "evaluation": {"episodes": 1},
        } | sections)
    )  # fmt: skip


def test_the_demonstrations_hash_is_part_of_the_run(tmp_path: Path) -> None:
    write_played(tmp_path / "balanced.csv", played(4, steps=40))
    run = Run.start(imitating(tmp_path), "a", inline=True)
    assert run.wait(120).reason == "exhausted"
    kept = yaml.safe_load((run.folder.path / "config.yaml").read_text())["demonstrations"]
    assert len(kept["sha256"]) == 64

    (tmp_path / "balanced.csv").rename(tmp_path / "moved.csv")
    here, moved = (f"demonstrations.path={tmp_path / name}" for name in ("balanced.csv", "moved.csv"))
    assert Run.resume("a", tmp_path / "runs", (moved, "stop_at.updates=6"), inline=True).wait(120).status.updates == 6

    write_played(tmp_path / "balanced.csv", played(5, steps=40))
    with pytest.raises(DatasetError, match=r"has the SHA-256 .*\(demonstrations.sha256\)"):
        Run.resume("a", tmp_path / "runs", (here, "stop_at.updates=9"), inline=True)
    with pytest.raises(UserError, match="cannot change in a resume, because it decides the learning"):
        Run.start(imitating(tmp_path), "a", inline=True, or_resume=True)


WRONG: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "no file": ("nowhere.csv", {}, ("demonstrations.path=", "nowhere.csv", "does not exist")),
    "other spaces": ("balanced.csv", {"environment": {"id": "Acrobot-v1"}}, ("balanced.csv", "obs.4")),
    "none is good enough": (
        "balanced.csv", {"demonstrations": {"path": "balanced.csv", "min_return": 400.0}},
        ("demonstrations.min_return=400", "returned 40"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_demonstrations_that_cannot_be_imitated_are_refused_with_exit_2(
    stagecoach: Stagecoach, tmp_path: Path, case: str
) -> None:
    name, sections, words = WRONG[case]
    write_played(tmp_path / "balanced.csv", played(4, steps=40))
    config = imitating(tmp_path, name, **sections).model_dump(mode="json", exclude_unset=True)
    (tmp_path / "imitating.yaml").write_text(yaml.safe_dump(config))
    check_refused(stagecoach("train", "imitating.yaml", "--run-id", "a"), *words)
    assert not (tmp_path / "runs").exists()
