"""`evaluate`: the best checkpoint of a run, one by its name, one in a folder; and what cannot be evaluated."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.catalog.checkpoint_lookup import evaluate, named_code
from coordinator.run import Run
from shared.errors import CheckpointNotFound, EnvironmentUnusable
from tests.conftest import minimal_config
from tests.support.command_line import Stagecoach, check_refused
from tests.support.environments import MODULE

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
    for folder in (checkpoints / LAST, f"file://{checkpoints / LAST}"):
        assert evaluate(str(folder), Path("nowhere"), 3) == by_name


def test_it_scores_the_same_each_time_unless_it_draws_its_actions_and_writes_nothing_into_the_run(run: Run) -> None:
    before = {path: path.read_bytes() for path in Path(run.store_location).rglob("*") if path.is_file()}
    assert evaluate("a", runs(run), 5) == (again := evaluate("a", runs(run), 5))
    assert evaluate("a", runs(run), 5, stochastic=True).scores["mean_return"] != again.scores["mean_return"]
    assert {path: path.read_bytes() for path in Path(run.store_location).rglob("*") if path.is_file()} == before


def test_a_checkpoint_without_its_runs_config_is_not_found(run: Run, checkpoints: Path) -> None:
    (checkpoints.parent / "config.yaml").unlink()
    with pytest.raises(CheckpointNotFound, match=r"is no run's folder: .*config\.yaml is missing"):
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


PAINTER, TARGET = f"{MODULE}:Painter", f"{MODULE}:Target"
DRAWS = "needs an environment that draws .*"
UNSEEN: list[tuple[dict[str, Any], str]] = [
    ({"id": TARGET}, f"{DRAWS}Target cannot be made: TypeError: Target"),
    ({"id": PAINTER, "kwargs": {"keeps": False}}, rf"{DRAWS}has render_mode=None after .* as self\.render_mode"),
    ({"id": PAINTER, "kwargs": {"modes": ["ansi"]}}, rf"{DRAWS}its metadata names only render_modes=\['ansi'\]"),
    ({"id": PAINTER, "kwargs": {"frames": False}}, r".*render\(\) returned NoneType, expected an array"),
    ({"id": f"{MODULE}:Twins", "api": "pettingzoo"}, ".*Twins is a PettingZoo one; `stagecoach play`"),
]


@pytest.mark.parametrize(
    ("command", "environment", "words"),
    [*(("play", *case) for case in UNSEEN[:3]), *(("--video", *case) for case in UNSEEN)],
)
def test_what_does_not_draw_is_told_before_it_plays_and_leaves_no_video(
    checkpoints: Path, tmp_path: Path, command: str, environment: dict[str, Any], words: str
) -> None:
    other_environment(checkpoints, environment)
    pytest.importorskip("moviepy")
    video = tmp_path / "videos" if command == "--video" else None
    with pytest.raises(EnvironmentUnusable, match=rf"^{command} {words}"):
        evaluate(str(checkpoints / LAST), Path("nowhere"), 1, video, show=video is None, trust_config=True)
    assert not (tmp_path / "videos").exists()


def other_environment(checkpoints: Path, environment: dict[str, Any]) -> None:
    """As if the run had been trained in it."""
    path = checkpoints.parent / "config.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"environment": {"num_envs": 4} | environment}))


def test_one_episode_is_told_as_one_and_a_failure_in_one_line(stagecoach: Stagecoach, checkpoints: Path) -> None:
    target = str(checkpoints / LAST)
    other_environment(checkpoints, {"id": PAINTER})
    assert stagecoach("play", target, "--trust-config").out == f"{LAST}: 5 in one episode of 5 steps\n"
    assert " over 2 episodes (" in stagecoach("play", target, "--episodes", "2", "--trust-config").out
    other_environment(checkpoints, {"id": PAINTER.replace("Painter", "Talks")})
    said = stagecoach("evaluate", target, "--episodes", "1", "--json", "--trust-config")
    assert json.loads(said.out)["mean_length"] == 5 and "step" in said.err
    other_environment(checkpoints, {"id": PAINTER, "kwargs": {"fails": True}})
    done = stagecoach("evaluate", target, "--trust-config")
    check_refused(done, "environment 0 raised RuntimeError in step: no display at :0")


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


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (
            "s3://bucket/my-run",
            "`stagecoach watch s3://bucket/my-run` makes a run in a bucket known here: then give my-",
        ),
        ("gs://bucket/my-run", "no checkpoint is taken from gs://bucket/my-run; expected a run's id, RUN/NAME, or"),
        (
            "file:///no/such/folder",
            "there is no folder /no/such/folder; expected a run's id, RUN/NAME, or the folder of",
        ),
        ("./nowhere", "/nowhere; expected a run's id"),
    ],
)
def test_a_place_without_a_checkpoint_is_told_with_what_is_taken(target: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=re.escape(said)):
        evaluate(target, tmp_path)
    with pytest.raises(CheckpointNotFound, match=r"holds no checkpoint .manifest\.json is missing"):
        evaluate(str(tmp_path), tmp_path)


@pytest.mark.parametrize("command", ["evaluate", "play", "replay"])
def test_code_that_a_foreign_config_names_is_run_only_where_it_is_trusted(
    run: Run, stagecoach: Stagecoach, tmp_path: Path, checkpoints: Path, command: str
) -> None:
    """As someone who may write into a bucket would have it: what makes the environment makes a folder."""
    proof = tmp_path / "it-ran"
    other_environment(checkpoints, {"id": "os:mkdir", "kwargs": {"path": str(proof)}})
    path = checkpoints.parent / "config.yaml"
    store = {"store": {"url": f"file://{path.parent.parent}"}}
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | store))
    assert stagecoach("watch", f"file://{checkpoints.parent}").code == 0
    targets = [checkpoints.parent.name] + ([str(checkpoints.parent)] if command != "replay" else [])
    for target in targets:
        said = ("comes from an exported folder or from another", "environment.id=os:mkdir", "--trust-config")
        check_refused(stagecoach(command, target), *said)
        assert not proof.exists()
    if command == "evaluate":
        stagecoach(command, targets[0], "--trust-config")
        assert proof.exists()


def test_all_wrappers_that_a_config_names_are_told() -> None:
    config = minimal_config(environment={"id": "CartPole-v1", "wrappers": ["envpool:Wrapper", "os:mkdir"]})
    assert named_code(config) == {"environment.wrappers": "envpool:Wrapper, os:mkdir"}
    assert not named_code(minimal_config(environment={"id": "envpool:Pong-v5", "vectorization": "native"}))
