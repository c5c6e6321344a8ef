"""Wrappers of our own, and that gymnasium's work as docs/FILTERS.md writes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import yaml

from rollout_worker.making import make
from rollout_worker.wrappers import ClipObservation, CropObservation, MapAction
from shared.config import EnvironmentConfig, PolicyConfig
from shared.errors import EnvironmentUnusable

PAGE = (Path(__file__).parent.parent.parent / "docs" / "FILTERS.md").read_text()


class Picture(gym.Env[Any, Any]):
    """Pixels that say where they are; the reward is the action as it arrives."""

    def __init__(self, shape: tuple[int, ...] = (6, 5, 3), action: str = "discrete") -> None:
        self.observation_space = gym.spaces.Box(0, 255, shape, np.uint8)
        box = gym.spaces.Box(-2.0, 2.0, (1,), np.float32)
        self.action_space: gym.spaces.Space[Any] = gym.spaces.Discrete(4) if action == "discrete" else box
        self._pixels = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._pixels, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._pixels, float(np.sum(action)), False, False, {}


def test_a_crop_is_that_part_of_the_image() -> None:
    env = CropObservation(Picture(), top=1, left=2, height=3, width=2)
    observation, _ = env.reset()
    assert observation.shape == env.observation_space.shape == (3, 2, 3)
    assert (observation == Picture().reset()[0][1:4, 2:4]).all() and env.observation_space.contains(observation)


@pytest.mark.parametrize("place", [(-1, 0, 2, 2), (0, 0, 7, 2), (0, 4, 2, 2), (0, 0, 0, 2)])
def test_a_crop_outside_of_the_image_is_refused(place: tuple[int, int, int, int]) -> None:
    with pytest.raises(EnvironmentUnusable, match="do not lie in an image of 6×5"):
        CropObservation(Picture(), *place)
    with pytest.raises(EnvironmentUnusable, match="needs an image"):
        CropObservation(gym.make("CartPole-v1"), 0, 0, 1, 1)


def test_observations_are_clipped_and_so_is_their_space() -> None:
    env = ClipObservation(Picture(), 10, 40)
    observation, _ = env.reset()
    assert (observation == np.clip(Picture().reset()[0], 10, 40)).all() and observation.dtype == np.uint8
    assert env.observation_space.contains(observation)
    assert isinstance(env.observation_space, gym.spaces.Box)
    assert (env.observation_space.low == 10).all() and (env.observation_space.high == 40).all()
    each = ClipObservation(gym.make("CartPole-v1"), [-1, -2, -0.1, -3], [1, 2, 0.1, 3])
    assert each.observation(np.full(4, 9, np.float32)).tolist() == pytest.approx([1, 2, 0.1, 3])


def test_bounds_that_are_none_are_refused() -> None:
    with pytest.raises(EnvironmentUnusable, match="low=3 is above high=2"):
        ClipObservation(Picture(), 3, 2)
    with pytest.raises(EnvironmentUnusable, match="needs a Box"):
        ClipObservation(gym.make("Taxi-v4"), 0, 1)


def test_actions_are_mapped() -> None:
    env = MapAction(Picture(), [3, 1])
    assert env.action_space == gym.spaces.Discrete(2)
    assert [env.step(action)[1] for action in (0, 1)] == [3.0, 1.0]
    assert [MapAction(Picture(action="box"), [[-1.5], [0.5]]).step(action)[1] for action in (0, 1)] == [-1.5, 0.5]


@pytest.mark.parametrize("actions", [[4], [], [[1.0]]])
def test_actions_that_do_not_exist_are_refused(actions: list[Any]) -> None:
    with pytest.raises(EnvironmentUnusable, match="MapAction: actions="):
        MapAction(Picture(), actions)


WRITTEN = [yaml.safe_load(text) for text in re.findall(r"`(\{path: .*?\}\})`", PAGE)]
WRITTEN += [{"path": text} for text in re.findall(r"`([\w.]+wrappers:\w+)`", PAGE)]


@pytest.mark.parametrize("wrapper", WRITTEN, ids=lambda wrapper: wrapper["path"].partition(":")[2])
def test_what_the_page_writes_works(wrapper: dict[str, Any]) -> None:
    name = wrapper["path"].partition(":")[2]
    if name == "ResizeObservation":
        pytest.importorskip("cv2", reason="resizing needs opencv, which the extra `atari` installs")
    kwargs: dict[str, Any] = {"shape": (210, 160, 3)} if "Observation" in name else {}
    kwargs |= {"action": "box"} if name in ("RescaleAction", "DiscretizeAction") else {}
    factory = f"{__name__}:Picture"
    config = EnvironmentConfig.model_validate({"id": factory, "kwargs": kwargs, "wrappers": [wrapper]})
    env = make(config)
    observation, _ = env.reset(seed=1)
    assert env.observation_space.contains(observation)
    env.step(env.action_space.sample())


def test_the_page_writes_them_all() -> None:
    """Every filter of the table that is a wrapper."""
    names = {wrapper["path"].partition(":")[2] for wrapper in WRITTEN}
    of_observations = {"Rescale", "FrameStack", "Crop", "Grayscale", "Resize", "Flatten", "Clip"}
    assert names == {f"{name}Observation" for name in of_observations} | {
        "DiscretizeAction",
        "MapAction",
        "RescaleAction",
    }


def test_the_fields_that_the_page_writes_are_fields() -> None:
    lines = [line.split(": ", 1) for line in re.findall(r"`policies\.default\.(.*?)`", PAGE) if ": " in line]
    fields = {name: yaml.safe_load(value) for name, value in lines}
    assert {"clip_observations", "normalise_observations", "reward_clip", "reward_scale"} < fields.keys()
    for name in ("normalise_rewards", "reward_ewma"):
        PolicyConfig.model_validate({other: value for other, value in fields.items() if other != name})
