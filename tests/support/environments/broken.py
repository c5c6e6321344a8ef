"""Environments with something wrong, each in its own way; and one with nothing."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

from tests.support.environments.small import Chase, Small

MODULE = "tests.support.environments.broken"


class Good(Small):
    """Five steps; observes random numbers of its seed."""

    observation_space: spaces.Space[Any] = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space: spaces.Space[Any] = spaces.Discrete(2)
    length = 5

    def observe(self) -> Any:
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)


def changed(**members: Any) -> type:
    return type("Changed", (Good,), members)


NotANumber = changed(observe=lambda self: np.array([0.0, np.nan], np.float32))
OutOfBounds = changed(observe=lambda self: 3.0 * Good.observe(self).astype(np.float64))
Fractions = changed(observation_space=spaces.Box(0, 255, (4, 3), np.uint8), observe=lambda self: np.full((4, 3), 0.5))
Beyond = changed(observation_space=spaces.Discrete(3), observe=lambda self: 3)
Parts = changed(
    observation_space=spaces.Dict({"here": spaces.Discrete(2), "missing": spaces.Discrete(2)}),
    observe=lambda self: {"here": 1},
)
Huge = changed(
    observation_space=spaces.Box(-np.inf, np.inf, (2,), np.float64), observe=lambda self: np.array([1e300, 0.0])
)
Unseeded = changed(observe=lambda self: np.random.uniform(-1, 1, 2).astype(np.float32))
Lucky = changed(reward=lambda self, action: np.random.uniform())
Lavish = changed(reward=lambda self, action: 3e38)
NoSpace = changed(action_space=None)
Silent = changed(reset=lambda self, *, seed=None, options=None: Good.reset(self, seed=seed) and None)


class NoOptions(Good):
    """Old interface, as many tutorials show it."""

    def reset(self, *, seed: int | None = None) -> Any:  # type: ignore[override]
        return super().reset(seed=seed)


PaysAnArray = changed(reward=lambda self, action: np.array([0.5]))
PaysTwice = changed(reward=lambda self, action: np.array([0.5, 0.5]))
Gray = changed(
    observation_space=spaces.Box(0, 255, (36, 36), np.uint8),
    observe=lambda self: self.np_random.integers(0, 256, (36, 36), np.uint8),
)
WholeForces = changed(action_space=spaces.Box(-2, 2, (1,), np.int64))
ManyStates = changed(
    observation_space=spaces.Discrete(3_000_000), observe=lambda self: int(self.np_random.integers(3_000_000))
)
Mission = changed(
    observation_space=spaces.Dict({"image": spaces.Box(0, 255, (7, 7, 3), np.uint8), "mission": spaces.Text(20)}),
    observe=lambda self: {"image": np.zeros((7, 7, 3), np.uint8), "mission": "go to the door"},
)


class OldGym(Good):
    """No seed, the observation alone, four values."""

    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()[0]

    def step(self, action: Any) -> Any:
        observation, reward, done, _, info = super().step(action)
        return observation, reward, done, info


class NoSpaces(gym.Env[Any, Any]):
    """Says nothing of itself."""


class AsInRllib:
    """RLlib's `MultiAgentEnv`, whose spaces are dicts."""

    possible_agents = ("first",)
    observation_spaces: ClassVar[Any] = {"first": gym.spaces.Discrete(2)}
    action_spaces = observation_spaces

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return {"first": 0}, {}

    def step(self, actions: Any) -> Any:
        return {"first": 0}, {"first": 0.0}, {"__all__": False}, {"__all__": False}, {}


class ManyThings(Good):
    """Shape, reward, flags and info, all at once."""

    def observe(self) -> Any:
        return np.zeros(3)

    def step(self, action: Any) -> Any:
        return self.observe(), float("nan"), 1, "no", None


class Quits(Good):
    """Leaves as a script does."""

    def step(self, action: Any) -> Any:
        raise SystemExit(3)


class MaskInInfo(Good):
    """Tells its legal actions where `action_mask: auto` does not look."""

    def step(self, action: Any) -> Any:
        *others, info = super().step(action)
        return *others, info | {"action_mask": np.ones(2, np.int8)}


class Picky(spaces.Discrete):
    """Space that does not contain its own samples."""

    def contains(self, x: Any) -> bool:
        return False


Picks = changed(action_space=Picky(2))


class Raises(Good):
    def step(self, action: Any) -> Any:
        if self._steps == 1:
            raise ValueError("the gripper\nis stuck")
        return super().step(action)


def nothing() -> None:
    """A factory that forgot to return what it has made."""


class Parting(Good):
    def close(self) -> None:
        raise OSError("no connection")


class OfNoClass:
    """Offers everything that Good does, but is not a gymnasium.Env."""

    observation_space, action_space = Good.observation_space, Good.action_space
    reset, step = Good.reset, Good.step


class NoLevel(Good):
    def __init__(self) -> None:
        Path("level.txt").read_text()


class Hangs(Good):
    """Hangs forever in one call."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._wait("start")

    def _wait(self, place: str) -> None:
        while place == self._place:
            time.sleep(1)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._wait("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        self._wait("step")
        return super().step(action)


class Dies(Good):
    """Ends its process in one way or another."""

    def __init__(self, how: str, at_start: bool = False) -> None:
        self._how = how
        if at_start:
            self.step(0)

    def step(self, action: Any) -> Any:
        print("no license found", file=sys.stderr, flush=True)
        if self._how == "exit":
            os._exit(3)
        if self._how == "crash":
            ctypes.string_at(0)
        os.kill(os.getpid(), signal.SIGKILL)


class Unnamed(ParallelEnv):  # type: ignore[misc]
    """Tells its agents only after a reset."""

    agents: list[str] = []


class SilentMouse(Chase):
    """A parallel environment whose mouse is rewarded with nothing and observes what is not in its space."""

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        observations, rewards, *rest = super().step(actions)
        return observations | {"mouse": np.zeros(5, np.float32)}, rewards | {"mouse": None}, *rest
