"""A person's play as a dataset: real keys in a real window (without a screen), read back as demonstrations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from stagecoach.rollout_worker.environments.description import describe_environment
from stagecoach.shared.config.loading import load_config
from stagecoach.shared.config.recorded import DemonstrationsConfig
from stagecoach.shared.datasets.read import read_dataset
from stagecoach.shared.datasets.recording import Episode
from tests.support.processes.command_line import Stagecoach, check_refused

pytest.importorskip("pygame")
CORRIDOR = '''
import gymnasium as gym
import numpy as np
import pygame

SCRIPT = {}  # step of the episode -> (event, key), that happen while it is shown

class Corridor(gym.Env):
    """A place and the seed's number are observed; ends at 4, and after 6 steps by truncation."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 1000}
    observation_space = gym.spaces.Dict({
        "place": gym.spaces.Discrete(12, start=-6), "noise": gym.spaces.Box(-1, 1, (2,), np.float32)})

    def __init__(self, render_mode=None, start=0, boxes=False):
        self.render_mode = render_mode
        self.action_space = gym.spaces.Box(-1, 1, (1,)) if boxes else gym.spaces.Discrete(3, start=start)

    def _seen(self):
        return {"place": self._place, "noise": self.np_random.uniform(-1, 1, 2).astype(np.float32)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._place, self._steps = 0, 0
        return self._seen(), {}

    def step(self, action):
        self._place, self._steps = self._place + int(action) - int(self.action_space.start) - 1, self._steps + 1
        return self._seen(), float(action) / 7, self._place == 4, self._steps == 6, {}

    def render(self):
        for event, key in SCRIPT.get(getattr(self, "_steps", 0), ()):
            pygame.event.post(pygame.event.Event(event, key=pygame.key.key_code(key)))
        return np.zeros((40, 60, 3), np.uint8)
'''
HELD = "\nSCRIPT = {0: [(pygame.KEYDOWN, 'THIS')]}\n"


@pytest.fixture
def folder(stagecoach: Stagecoach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for driver in ("SDL_VIDEODRIVER", "SDL_AUDIODRIVER"):
        monkeypatch.setenv(driver, "dummy")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def write_config(folder: Path, module: str, script: str, **kwargs: int | bool) -> Path:
    """The corridor in a module of its own: one that was imported stays as it was."""
    (folder / f"{module}.py").write_text(CORRIDOR + script)
    path = folder / f"{module}.yaml"
    environment = {"id": f"{module}:Corridor", "kwargs": kwargs, "num_envs": 2}
    path.write_text(yaml.safe_dump({"environment": environment, "seed": 5, "stop_at": {"updates": 1}}))
    return path


def recorded(path: Path) -> list[Episode]:
    config = load_config(path)
    demonstrations = DemonstrationsConfig(path=str(path.parent / "played" / "played.csv"))
    return list(read_dataset(demonstrations, describe_environment(config))["default"].episodes())


def test_recorded_play_equals_demonstrations(stagecoach: Stagecoach, folder: Path) -> None:
    """Held from the first picture on; the first step comes before the keys are looked at, and stands still."""
    path = write_config(folder, "corridor_held", HELD.replace("THIS", "right"), start=3)
    play = ("play", str(path), "--record", str(folder / "played"), "--keys", "left=3,right=5", "--idle", "4")
    assert "2 whole episodes" in stagecoach(*play, "--episodes", "2").ok()
    first, second = recorded(path)
    moves = first.actions["action"].tolist()
    assert set(moves) <= {1, 2} and moves[-4:] == [2, 2, 2, 2], "counted from 0, as everywhere"
    assert first.terminated and len(second) == 4 and second.actions["action"].tolist() == [2] * 4
    np.testing.assert_array_equal(second.observations["obs.place"], [6, 7, 8, 9, 10])
    np.testing.assert_array_equal(second.reward, np.full(4, np.float32(5 / 7)))
    environment_numbers = {tuple(episode.observations["obs.noise"][0].tolist()) for episode in (first, second)}
    assert len(environment_numbers) == 2, "each episode begins otherwise"
    assert first.observations["obs.noise"].dtype == np.float32
    assert "1 whole episode" in stagecoach(*play).ok()
    assert len(recorded(path)) == 3, "behind what was there"
    begun = {tuple(episode.observations["obs.noise"][0].tolist()) for episode in recorded(path)}
    assert len(begun) == 3


def test_recorded_play_drops_unfinished_and_truncates_at_limit(stagecoach: Stagecoach, folder: Path) -> None:
    path = write_config(folder, "corridor_waits", HELD.replace("THIS", "1"))  # stands still: 0 left, 1 still, 2 right
    stagecoach("play", str(path), "--record", str(folder / "played"), "--wait").ok()
    (episode,) = recorded(path)
    assert episode.actions["action"].tolist() == [1] * 6 and not episode.terminated and episode.record is not None
    left = "\nSCRIPT = {0: [(pygame.KEYDOWN, '2')], 2: [(pygame.KEYDOWN, 'escape')]}\n"
    path = write_config(folder, "corridor_left", left)
    assert "0 whole episodes" in stagecoach("play", str(path), "--record", str(folder / "played"), "--wait").ok()
    assert len(recorded(path)) == 1


@pytest.mark.parametrize(
    ("kwargs", "arguments", "said"),
    [
        ({"boxes": True}, (), "keys choose among the actions of a Discrete space, found Box"),
        ({}, ("--keys", "a"), "--keys 'a': expected KEY=ACTION, as in left=0,right=1"),
        ({}, ("--keys", "nokey=1"), "--keys has nokey; expected names of keys"),
        ({}, ("--keys", "a=7"), "actions are 0 to 2, found {'a': 7}"),
        ({}, ("--idle", "3"), "actions are 0 to 2, found {'--idle': 3}"),
    ],
)
def test_recorded_play_explains_refusals_in_one_line(
    stagecoach: Stagecoach, folder: Path, kwargs: dict[str, bool], arguments: tuple[str, ...], said: str
) -> None:
    path = write_config(folder, f"corridor_{'boxes' if kwargs else 'keys'}", "", **kwargs)
    check_refused(stagecoach("play", str(path), "--record", "played", *arguments), said)


def test_recorded_play_refuses_hierarchy(stagecoach: Stagecoach, folder: Path) -> None:
    path = write_config(folder, "corridor_options", "\ndef own(before, action, after, info): return 1.0\n")
    data = yaml.safe_load(path.read_text())
    data["environment"]["hierarchy"] = {"options": {"rewards": ["environment", "corridor_options:own"], "lengths": [1]}}
    path.write_text(yaml.safe_dump(data))
    said = "--record is for one person and so for one agent; play without environment.hierarchy"
    check_refused(stagecoach("play", str(path), "--record", "played"), said)


def test_recorded_play_refuses_other_environment_or_options(stagecoach: Stagecoach, folder: Path) -> None:
    (folder / "played").mkdir()
    (folder / "played" / "played.csv").write_text("obs.0,action,reward,terminated\n")
    path = write_config(folder, "corridor_other", "")
    check_refused(
        stagecoach("play", str(path), "--record", "played"), "is from another environment: its columns are obs.0,"
    )
    check_refused(stagecoach("play", "my-run", "--wait"), "say how you play; give --record DIR as well")
