"""Our wrappers, and Gymnasium's as written in docs/guides/filters.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import yaml

from stagecoach.coordinator.lifecycle.validation import check
from stagecoach.rollout_worker.environments.factory import evaluation_environment, make_environment
from stagecoach.rollout_worker.environments.wrappers import (
    ClipObservation,
    CropObservation,
    EpisodicLife,
    FireReset,
    MapAction,
)
from stagecoach.shared.base.errors import EnvironmentUnusable
from stagecoach.shared.config.environments.environment import EnvironmentConfig
from stagecoach.shared.config.loading import load_config
from stagecoach.shared.config.sections import PolicyConfig

ROOT = Path(__file__).parents[3]
PAGE, BREAKOUT = (ROOT / "docs/guides/filters.md").read_text(), ROOT / "examples" / "breakout.yaml"


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


def test_crop_returns_part_of_image() -> None:
    env = CropObservation(Picture(), top=1, left=2, height=3, width=2)
    observation, _ = env.reset()
    assert observation.shape == env.observation_space.shape == (3, 2, 3)
    assert (observation == Picture().reset()[0][1:4, 2:4]).all() and env.observation_space.contains(observation)


def test_clip_observation_bounds_values_and_space() -> None:
    env = ClipObservation(Picture(), 10, 40)
    observation, _ = env.reset()
    assert (observation == np.clip(Picture().reset()[0], 10, 40)).all() and observation.dtype == np.uint8
    assert env.observation_space.contains(observation)
    assert isinstance(env.observation_space, gym.spaces.Box)
    assert (env.observation_space.low == 10).all() and (env.observation_space.high == 40).all()
    each = ClipObservation(gym.make("CartPole-v1"), [-1, -2, -0.1, -3], [1, 2, 0.1, 3])
    assert each.observation(np.full(4, 9, np.float32)).tolist() == pytest.approx([1, 2, 0.1, 3])


def test_map_action_maps_discrete_actions() -> None:
    env = MapAction(Picture(), [3, 1])
    assert env.action_space == gym.spaces.Discrete(2)
    assert [env.step(action)[1] for action in (0, 1)] == [3.0, 1.0]
    assert [MapAction(Picture(action="box"), [[-1.5], [0.5]]).step(action)[1] for action in (0, 1)] == [-1.5, 0.5]


class Lives(gym.Env[Any, Any]):
    """Three lives. Nothing moves until FIRE; then each step pays 1, and every third one costs a life."""

    observation_space = gym.spaces.Box(0, 1000, (3,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, meanings: tuple[str, ...] = ("NOOP", "FIRE", "LEFT"), late: int = 0) -> None:
        self._meanings, self._late = meanings, late
        self.games, self.lives, self.flying, self.shown = 0, 0, 0, 0

    def get_action_meanings(self) -> list[str]:
        return list(self._meanings)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.games, self.lives, self.flying, self.shown = self.games + 1, 3, 0, 0
        return self._seen(), {"lives": self.lives}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        moves = self.flying > 0 or action == 1
        self.flying = self.flying + 1 if moves else 0
        if self.flying == 3:
            self.lives, self.flying = self.lives - 1, 0
        self.shown += self.lives == 0
        over = self.shown > self._late  # some games go on for a while without a life
        return self._seen(), float(moves), over, False, {"lives": self.lives}

    def _seen(self) -> Any:
        return np.array([self.games, self.lives, self.flying], np.float32)


def test_episodic_life_ends_episode_but_not_game() -> None:
    env = EpisodicLife(Lives())
    for life in (3, 2, 1):
        observation, info = env.reset(seed=life)
        assert observation.tolist() == [1, life, 0] and info["lives"] == life
        ends = [env.step(1)[2] for _ in range(3)]
        assert ends == [False, False, True]
    assert env.reset(seed=9)[0].tolist() == [2, 3, 0], "the game was over"


def test_episodic_life_waits_for_game_over() -> None:
    env = EpisodicLife(Lives(late=2))
    for _ in range(2):
        env.reset()
        assert [env.step(1)[2] for _ in range(3)][-1]
    env.reset()
    assert [env.step(1)[2] for _ in range(5)] == [False] * 4 + [True]


def test_episodic_life_resets_game_after_truncation() -> None:
    env = gym.wrappers.TimeLimit(EpisodicLife(Lives()), 2)
    for game in (1, 2):
        assert env.reset()[0].tolist() == [game, 3, 0]
        assert [env.step(1)[2:4] for _ in range(2)] == [(False, False), (False, True)]


def test_fire_reset_fires_at_each_new_life() -> None:
    game = FireReset(Lives())
    assert game.reset()[0].tolist() == [1, 3, 1]
    paid, over = 0.0, False
    while not over:
        _, reward, over, _, _ = game.step(0)
        paid += float(reward)
    assert paid == 8, "all but the first FIRE, which is of no step"
    lives = FireReset(EpisodicLife(Lives()))
    for life in (3, 2, 1):
        assert lives.reset()[0].tolist() == [1, life, 1]
        assert [lives.step(0)[:3:2] for _ in range(2)][-1][1]


BEYOND = [(-1, 0, 2, 2), (0, 0, 7, 2), (0, 4, 2, 2), (0, 0, 0, 2)]


@pytest.mark.parametrize(
    ("made", "says"),
    [
        *[(partial(CropObservation, Picture(), *place), "do not lie in an image of 6×5") for place in BEYOND],
        (lambda: CropObservation(gym.make("CartPole-v1"), 0, 0, 1, 1), "needs an image"),
        (lambda: ClipObservation(Picture(), 3, 2), "low=3 is above high=2"),
        (lambda: ClipObservation(gym.make("Taxi-v4"), 0, 1), "needs a Box"),
        *[(partial(MapAction, Picture(), actions), "MapAction: actions=") for actions in ([4], [], [[1.0]])],
        (lambda: EpisodicLife(Picture()).reset(), r"EpisodicLife reads info\['lives'\]"),
        (lambda: FireReset(Picture()), "FireReset: action 1 has to be FIRE, found"),
        (lambda: FireReset(Lives(meanings=("NOOP", "LEFT", "FIRE"))), "FireReset: action 1 has to be FIRE, found"),
    ],
)
def test_wrappers_refuse_unsuitable_environments(made: Callable[[], object], says: str) -> None:
    with pytest.raises(EnvironmentUnusable, match=says):
        made()


class Fourfold(gym.Wrapper[Any, Any, Any, Any]):
    """Takes four steps of the environment per step."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        return [self.env.step(action) for _ in range(4)][-1]


@pytest.mark.parametrize(
    ("id_", "wrappers", "steps"),
    [
        ("Pendulum-v1", [f"{__name__}:Fourfold"], 20),
        (f"{__name__}:Lives", [f"{__name__}:Fourfold"], 20),
        ("Pendulum-v1", [], 250),  # more than it registers
    ],
)
def test_max_episode_steps_counts_agent_steps(id_: str, wrappers: list[str], steps: int) -> None:
    data = {"id": id_, "wrappers": wrappers, "max_episode_steps": steps}
    env = make_environment(EnvironmentConfig.model_validate(data))
    env.reset(seed=1)
    action = env.action_space.sample() * 0  # moves nothing, so that no life is lost
    assert [env.step(action)[2:4] for _ in range(steps)] == [(False, False)] * (steps - 1) + [(False, True)]


def breakout(config: EnvironmentConfig, **changes: Any) -> Any:
    """The example's environment; ALE's own frames, where opencv is not there to make them small."""
    wrappers = [wrapper for wrapper in config.wrappers if wrapper.path.startswith("stagecoach.rollout_worker.")]
    kwargs = config.kwargs | {"frameskip": 4}
    return make_environment(config.model_copy(update={"wrappers": tuple(wrappers), "kwargs": kwargs} | changes))


def lives_of_a_game(env: Any) -> list[int]:
    """The lives that are left where each episode ends, until a game is over."""
    ends: list[int] = []
    draw = np.random.default_rng(0)
    while not ends or ends[-1]:
        _, info = env.reset(seed=len(ends))
        over = False
        while not over:
            _, _, terminated, truncated, info = env.step(int(draw.integers(4)))
            over = terminated or truncated
        ends.append(info["lives"])
    return ends


def test_breakout_trains_on_lives_evaluates_whole_games() -> None:
    config = load_config(BREAKOUT, environ={})
    training, whole = config.environment, evaluation_environment(config)
    assert lives_of_a_game(breakout(training)) == [4, 3, 2, 1, 0]
    assert lives_of_a_game(breakout(whole)) == [0]
    assert config.policies["default"].reward_clip == (-1.0, 1.0)
    short = breakout(training, max_episode_steps=3)
    short.reset(seed=1)
    assert [short.step(0)[3] for _ in range(3)] == [False, False, True]


def test_breakout_stacks_frames() -> None:
    pytest.importorskip("cv2", reason="the preprocessing needs opencv, 150 MB that only the extra `atari` installs")
    config = load_config(BREAKOUT, environ={})
    check(config)
    env = make_environment(config.environment)
    observation, _ = env.reset(seed=1)
    assert observation.shape == (4, 84, 84) and env.observation_space.contains(observation)


WRITTEN = [yaml.safe_load(text) for text in re.findall(r"`(\{path: .*?\}\})`", PAGE)]
WRITTEN += [{"path": text} for text in re.findall(r"`([\w.]+wrappers:\w+)`", PAGE)]


@pytest.mark.parametrize("wrapper", WRITTEN, ids=lambda wrapper: wrapper["path"].partition(":")[2])
def test_filters_page_recipes_work(wrapper: dict[str, Any]) -> None:
    name = wrapper["path"].partition(":")[2]
    if name == "ResizeObservation":
        pytest.importorskip("cv2", reason="resizing needs opencv, which the extra `atari` installs")
    kwargs: dict[str, Any] = {"shape": (210, 160, 3)} if "Observation" in name else {}
    kind = "Lives" if name in ("EpisodicLife", "FireReset") else "Picture"
    kwargs |= {"action": "box"} if name in ("RescaleAction", "DiscretizeAction") else {}
    factory = f"{__name__}:{kind}"
    config = EnvironmentConfig.model_validate({"id": factory, "kwargs": kwargs, "wrappers": [wrapper]})
    env = make_environment(config)
    observation, _ = env.reset(seed=1)
    assert env.observation_space.contains(observation)
    env.step(env.action_space.sample())


def test_filters_page_lists_all_wrappers() -> None:
    """Checks each filter of the table that is a wrapper."""
    names = {wrapper["path"].partition(":")[2].removesuffix("Observation") for wrapper in WRITTEN}
    of_observations = {"Rescale", "FrameStack", "Crop", "Grayscale", "Resize", "Flatten", "Clip"}
    assert names == of_observations | {"DiscretizeAction", "EpisodicLife", "FireReset", "MapAction", "RescaleAction"}


def test_filters_page_fields_are_valid() -> None:
    lines = [line.split(": ", 1) for line in re.findall(r"`policies\.default\.(.*?)`", PAGE) if ": " in line]
    fields = {name: yaml.safe_load(value) for name, value in lines}
    assert {"clip_observations", "normalize_observations", "reward_clip", "reward_scale"} < fields.keys()
    for name in ("normalize_rewards", "reward_ewma"):
        PolicyConfig.model_validate({other: value for other, value in fields.items() if other != name})
