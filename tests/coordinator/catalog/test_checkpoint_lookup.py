"""`evaluate`: the best checkpoint of a run, one by its name, one in a folder; and what cannot be evaluated."""

from __future__ import annotations

import json
import re
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import yaml

from stagecoach.coordinator.catalog.checkpoint_lookup import evaluate, named_code
from stagecoach.coordinator.run_access.run import Run
from stagecoach.shared.base.errors import CheckpointNotFound, EnvironmentUnusable
from stagecoach.shared.config.run_config import Config
from tests.conftest import minimal_config
from tests.support.environments import games
from tests.support.environments.small import MODULE
from tests.support.processes.command_line import Stagecoach, check_refused, contents

LAST = "4_Step-256.ckpt"
MakeConfig = Callable[..., Config]


@pytest.fixture
def checkpoints(ended_run: Run, tmp_path: Path) -> Path:
    """A copy of the run's checkpoints that a test may spoil."""
    shutil.copytree(ended_run.store_location, tmp_path / "a")
    return tmp_path / "a" / "checkpoints"


@pytest.fixture
def runs(ended_run: Run) -> Path:
    return ended_run.config.runs_dir


def test_evaluate_takes_best_checkpoint(ended_run: Run, runs: Path) -> None:
    found = evaluate("a", runs)
    entry = next(entry for entry in ended_run.checkpoints() if "best" in entry["marks"])
    assert found.checkpoint == entry["name"]
    assert found.scores["mean_return"] == entry["evaluation"]["confirmation"]["mean_return"]
    assert found.scores["episodes"] == ended_run.config.evaluation.episodes


def test_find_checkpoint_by_name_and_folder(
    runs: Path, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "code" / "a").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "code")  # whose folder of a run's name holds something else
    by_name = evaluate(f"a/{LAST}", runs, 3)
    assert (by_name.checkpoint, by_name.scores["episodes"]) == (LAST, 3)
    assert evaluate("a/latest", runs, 3) == by_name and evaluate("a", runs, 3).scores["episodes"] == 3
    for folder in (checkpoints / LAST, f"file://{checkpoints / LAST}"):
        assert evaluate(str(folder), Path("nowhere"), 3) == by_name


def test_evaluate_repeats_scores_and_writes_nothing_into_run(runs: Path) -> None:
    before = contents(runs)
    assert evaluate("a", runs, 5) == (again := evaluate("a", runs, 5))
    assert evaluate("a", runs, 5, stochastic=True).scores["mean_return"] != again.scores["mean_return"]
    assert contents(runs) == before


def test_find_checkpoint_refuses_folder_without_config(checkpoints: Path) -> None:
    (checkpoints.parent / "config.yaml").unlink()
    with pytest.raises(
        CheckpointNotFound, match=r"is not a run's folder: .*config\.yaml, which names the environment, is missing"
    ):
        evaluate(str(checkpoints / LAST), Path("nowhere"))


def test_evaluate_records_each_episode_or_names_missing_package(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "moviepy", None)
        with pytest.raises(EnvironmentUnusable, match=r"pip install .*\[video\]"):
            evaluate("a", runs, 1, tmp_path / "videos")
    assert not (tmp_path / "videos").exists()
    pytest.importorskip("moviepy")  # CI installs them
    pytest.importorskip("pygame")
    found = evaluate("a", runs, 2, tmp_path / "videos")
    assert [path.name for path in found.videos] == sorted(path.name for path in (tmp_path / "videos").iterdir())
    assert len(found.videos) == 2
    assert all(b"ftyp" in path.read_bytes()[:16] for path in found.videos)


class Lines(gym.Env[Any, Any]):
    """Draws a picture; an episode has as many steps as it is made with."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    observation_space, action_space = gym.spaces.Box(0, 1, (1,), np.float32), gym.spaces.Discrete(2)

    def __init__(self, length: int = 1, render_mode: str | None = None) -> None:
        self.length, self.render_mode, self.steps = length, render_mode, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.zeros(1, np.float32), 1.0, self.steps >= self.length, False, {}

    def render(self) -> Any:
        return np.full((16, 16, 3), 9 * self.steps, np.uint8)


def test_evaluate_records_episodes_when_environment_is_rebuilt(config: MakeConfig, tmp_path: Path) -> None:
    pytest.importorskip("moviepy")
    drawn = {"parameters": {"length": {"choice": [2, 3, 4, 5]}}, "parameters_by": "rebuild"}
    made = config(environment={"id": f"{__name__}:Lines"} | drawn, evaluation={"episodes": 0})
    assert Run.start(made, "a", inline=True).wait(120).reason == "exhausted"
    for episodes in (4, 3):
        found = evaluate("a", tmp_path / "runs", episodes, tmp_path / "videos")
        assert sorted(found.videos) == sorted((tmp_path / "videos").iterdir()) and len(found.videos) == episodes
        seconds = [struct.unpack(">II", path.read_bytes().partition(b"mvhd")[2][12:20]) for path in found.videos]
        frames = sum(round(10 * duration / scale) for scale, duration in seconds)
        assert frames == round(episodes * (1 + found.scores["mean_return"])), "of the episodes that are scored"


@pytest.mark.parametrize("name", ["Painted", "PaintedInTurns"])
def test_each_episode_of_several_agents_becomes_a_video(config: MakeConfig, tmp_path: Path, name: str) -> None:
    pytest.importorskip("moviepy")
    made = config(environment={"api": "pettingzoo", "id": f"{games.MODULE}:{name}"})
    assert Run.start(made, "a", inline=True).wait(120).reason == "exhausted"
    found = evaluate("a", tmp_path / "runs", 2, tmp_path / "videos")
    assert [path.name for path in found.videos] == sorted(path.name for path in (tmp_path / "videos").iterdir())
    assert len(found.videos) == 2
    for path in found.videos:
        scale, duration = struct.unpack(">II", path.read_bytes().partition(b"mvhd")[2][12:20])
        assert duration / scale >= 0.4, "three steps and a beginning at least, at 10 frames a second"


PAINTER, TARGET = f"{MODULE}:Painter", f"{MODULE}:Target"
DRAWS = "needs an environment that draws .*"
UNSEEN: list[tuple[dict[str, Any], str]] = [
    ({"id": TARGET}, f"{DRAWS}Target cannot be created: TypeError: Target"),
    (
        {"id": PAINTER, "kwargs": {"keeps": False}},
        rf"{DRAWS}its render_mode is None, not the argument; set self\.render_mode",
    ),
    ({"id": PAINTER, "kwargs": {"modes": ["ansi"]}}, rf"{DRAWS}its metadata names only render_modes=\['ansi'\]"),
    ({"id": PAINTER, "kwargs": {"frames": False}}, r".*render\(\) returned NoneType, expected an array"),
    ({"id": f"{games.MODULE}:Painted", "api": "pettingzoo", "kwargs": {"frames": False}}, r".*returned NoneType"),
]


@pytest.mark.parametrize(
    ("command", "environment", "words"),
    [*(("play", *case) for case in UNSEEN[:3]), *(("--video", *case) for case in UNSEEN)],
)
def test_evaluate_refuses_environment_that_does_not_render(
    checkpoints: Path, tmp_path: Path, command: str, environment: dict[str, Any], words: str
) -> None:
    other_environment(checkpoints, environment)
    pytest.importorskip("moviepy")
    video = tmp_path / "videos" if command == "--video" else None
    with pytest.raises(EnvironmentUnusable, match=rf"^{command} {words}"):
        evaluate(str(checkpoints / LAST), Path("nowhere"), 1, video, show=video is None, trust_config=True)
    assert not (tmp_path / "videos").exists()


def change_config(checkpoints: Path, **sections: Any) -> None:
    path = checkpoints.parent / "config.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | sections))


def other_environment(checkpoints: Path, environment: dict[str, Any]) -> None:
    """As if the run had been trained in it."""
    change_config(checkpoints, environment={"num_envs": 4} | environment)


def test_evaluate_prints_one_episode_and_failure_in_one_line(stagecoach: Stagecoach, checkpoints: Path) -> None:
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


def test_play_shows_same_episodes(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pygame = pytest.importorskip("pygame")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setenv("SDL_AUDIODRIVER", "dummy")
    shown: list[None] = []
    monkeypatch.setattr(pygame.display, "flip", lambda: shown.append(None))
    found = evaluate("a", runs, 1, show=True)
    assert len(shown) >= found.scores["mean_length"] > 0
    assert found.scores["mean_return"] == evaluate("a", runs, 1).scores["mean_return"]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("gs://bucket/my-run", "cannot read checkpoints from gs://bucket/my-run; expected a run's id, RUN/NAME, s3"),
        ("file:///no/such/folder", "folder /no/such/folder does not exist; expected a run's id, RUN/NAME, s3://bucket"),
        ("./nowhere", "/nowhere does not exist; expected a run's id"),
    ],
)
def test_find_checkpoint_names_expected_places(target: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=re.escape(said)):
        evaluate(target, tmp_path)
    with pytest.raises(CheckpointNotFound, match=r"holds no checkpoint .manifest\.json is missing"):
        evaluate(str(tmp_path), tmp_path)


@pytest.mark.parametrize("command", ["evaluate", "play", "replay"])
def test_evaluate_runs_code_of_foreign_config_only_when_trusted(
    stagecoach: Stagecoach, tmp_path: Path, checkpoints: Path, command: str
) -> None:
    """As someone who may write into a bucket would have it: what makes the environment makes a folder."""
    proof = tmp_path / "it-ran"
    other_environment(checkpoints, {"id": "os:mkdir", "kwargs": {"path": str(proof)}})
    change_config(checkpoints, store={"url": f"file://{checkpoints.parent.parent}"})
    stagecoach("watch", f"file://{checkpoints.parent}").ok()
    targets = [checkpoints.parent.name] + ([str(checkpoints.parent)] if command != "replay" else [])
    for target in targets:
        said = ("comes from an exported folder or another", "environment.id=os:mkdir", "--trust-config")
        check_refused(stagecoach(command, target), *said)
        assert not proof.exists()
    if command == "evaluate":
        stagecoach(command, targets[0], "--trust-config")
        assert proof.exists()


def test_every_field_that_names_code_is_told() -> None:
    """Also one that has come to the config since: each text of this form is, but for arguments."""
    options = {"rewards": ["environment", "os:mkdir", "shutil:rmtree"], "lengths": [1, 2]}
    environment = {"id": "CartPole-v1", "kwargs": {"mode": "a:b"}, "hierarchy": {"options": options}}
    assert named_code(minimal_config(environment=environment)) == {
        "environment.hierarchy.options.rewards": "os:mkdir, shutil:rmtree"
    }
    for odd in ("ale_py:ALE/Pong-v5", "evil:NS/Env-v0", "evil:a b", "evil:x://y"):
        assert named_code(minimal_config(environment={"id": odd})) == {"environment.id": odd}, "evil is imported first"
    config = minimal_config(environment={"id": "CartPole-v1", "wrappers": ["envpool:Wrapper", "os:mkdir"]})
    assert named_code(config) == {"environment.wrappers": "envpool:Wrapper, os:mkdir"}
    assert not named_code(minimal_config(environment={"id": "envpool:Pong-v5", "vectorization": "native"}))
    config = minimal_config(policies={"kwargs": {"transform": "os:mkdir"}}, evaluation={"wrappers": ["os:rmdir"]})
    assert named_code(config) == {"policies.kwargs.transform": "os:mkdir", "evaluation.wrappers": "os:rmdir"}
    league: dict[str, Any] = {
        "fixed": {"old": "file:///runs/old", "scripted": "os:mkdir", "random": "random", "rival": "old#main"}
    }
    league |= {"sides": [["team:0"], ["team:1"]]}
    config = minimal_config(environment={"id": "own:make", "api": "pettingzoo"}, league=league)
    assert named_code(config) == {"environment.id": "own:make", "league.fixed.scripted.source": "os:mkdir"}
