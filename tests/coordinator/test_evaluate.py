"""`evaluate`: the best checkpoint of a run, one by its name, one in a folder; and what cannot be evaluated."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from coordinator.evaluate import evaluate
from coordinator.run import Run
from shared.errors import CheckpointDamaged, CheckpointNotFound, EnvironmentUnusable, RunNotFound
from tests.conftest import minimal_config

LAST = "4_Step-256.ckpt"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An ended run with three checkpoints."""
    run = Run.start(minimal_config(runs_dir=str(tmp_path_factory.mktemp("evaluate"))), "a", inline=True)
    assert run.wait(120).reason == "exhausted"
    return run


@pytest.fixture
def checkpoints(run: Run, tmp_path: Path) -> Path:
    """A copy of the run's checkpoints that a test may spoil."""
    shutil.copytree(run.store_location, tmp_path / "a")
    return tmp_path / "a" / "checkpoints"


def runs(run: Run) -> Path:
    return run.config.runs_dir


def test_a_run_is_judged_by_its_best_checkpoint(run: Run) -> None:
    found = evaluate("a", runs(run))
    entry = next(entry for entry in run.checkpoints() if "best" in entry["marks"])
    assert found.checkpoint == entry["name"]
    assert found.scores["mean_return"] == entry["evaluation"]["confirmation"]["mean_return"]
    assert found.scores["episodes"] == run.config.evaluation.episodes
    assert found.videos == ()


def test_a_checkpoint_is_found_by_its_name_and_in_its_folder(run: Run, checkpoints: Path) -> None:
    by_name = evaluate(f"a/{LAST}", runs(run), 3)
    assert (by_name.checkpoint, by_name.scores["episodes"]) == (LAST, 3)
    assert evaluate(str(checkpoints / LAST), Path("nowhere"), 3) == by_name


def test_it_scores_the_same_each_time(run: Run) -> None:
    assert evaluate("a", runs(run), 5) == evaluate("a", runs(run), 5)


def test_it_writes_nothing_into_the_run(run: Run) -> None:
    before = {path: path.read_bytes() for path in Path(run.store_location).rglob("*") if path.is_file()}
    evaluate("a", runs(run), 1)
    assert {path: path.read_bytes() for path in Path(run.store_location).rglob("*") if path.is_file()} == before


def test_an_unknown_run_or_checkpoint_is_not_found(run: Run, checkpoints: Path) -> None:
    with pytest.raises(RunNotFound, match="runs there: a"):
        evaluate("nobody", runs(run))
    with pytest.raises(CheckpointNotFound, match=rf"no checkpoint '9_Step-9\.ckpt'; there are: .*{LAST}"):
        evaluate("a/9_Step-9.ckpt", runs(run))
    (checkpoints.parent / "config.yaml").unlink()
    with pytest.raises(CheckpointNotFound, match=r"is no run's folder: .*config\.yaml is missing"):
        evaluate(str(checkpoints / LAST), runs(run))


def test_an_altered_checkpoint_is_refused(run: Run, checkpoints: Path) -> None:
    policy = checkpoints / LAST / "default" / "policy.safetensors"
    policy.write_bytes(policy.read_bytes()[:-1] + b"\x00")
    with pytest.raises(CheckpointDamaged, match="was altered"):
        evaluate(str(checkpoints / LAST), runs(run))
    manifest = checkpoints / LAST / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 99}))
    with pytest.raises(CheckpointDamaged, match="has format 99"):
        evaluate(str(checkpoints / LAST), runs(run))


def test_a_video_without_its_package_says_what_to_install(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "moviepy", None)
    with pytest.raises(EnvironmentUnusable, match=r"pip install .*\[video\]"):
        evaluate("a", runs(run), 1, tmp_path / "videos")
    assert not (tmp_path / "videos").exists()


def test_each_episode_becomes_a_video(run: Run, tmp_path: Path) -> None:
    """Without its extra packages this is told by the test before; CI installs them."""
    pytest.importorskip("moviepy")
    pytest.importorskip("pygame")
    found = evaluate("a", runs(run), 2, tmp_path / "videos")
    assert [path.name for path in found.videos] == sorted(path.name for path in (tmp_path / "videos").iterdir())
    assert len(found.videos) == 2
    assert all(b"ftyp" in path.read_bytes()[:16] for path in found.videos)


def test_it_can_be_watched_and_draws_the_same_episodes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pygame = pytest.importorskip("pygame")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setenv("SDL_AUDIODRIVER", "dummy")
    shown = 0

    def flip() -> None:
        nonlocal shown
        shown += 1

    monkeypatch.setattr(pygame.display, "flip", flip)
    found = evaluate("a", runs(run), 1, show=True)
    assert shown >= found.scores["mean_length"] > 0
    assert found.scores["mean_return"] == evaluate("a", runs(run), 1).scores["mean_return"]


def test_it_may_draw_its_actions_as_in_training(run: Run) -> None:
    drawn = evaluate("a", runs(run), 5, stochastic=True)
    assert drawn.scores["mean_return"] != evaluate("a", runs(run), 5).scores["mean_return"]


def test_a_folder_without_a_checkpoint_is_named_as_such(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=r"holds no checkpoint .manifest\.json is missing"):
        evaluate(str(tmp_path), tmp_path)
