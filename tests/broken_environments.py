"""Environments with something wrong, each in its own way; and one with nothing."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

from tests.environments_for_tests import Chase

MODULE = "tests.broken_environments"
Array = np.ndarray[Any, Any]


class Good(gym.Env[Any, Any]):
    """Five steps; observes random numbers of its seed."""

    observation_space: spaces.Space[Any] = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space: spaces.Space[Any] = spaces.Discrete(2)

    def observe(self) -> Any:
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._steps = 0
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        return self.observe(), 1.0, self._steps == 5, False, {}


class OldGym(Good):
    """No seed, the observation alone, four values."""

    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()[0]

    def step(self, action: Any) -> Any:
        observation, reward, done, _, info = super().step(action)
        return observation, reward, done, info


class NoSpaces(gym.Env[Any, Any]):
    """Says nothing of itself."""


class ManyThings(Good):
    """Shape, reward, flags and info, all at once."""

    def observe(self) -> Any:
        return np.zeros(3)

    def step(self, action: Any) -> Any:
        return self.observe(), float("nan"), 1, "no", None


class NotANumber(Good):
    """NaN in an observation."""

    def observe(self) -> Any:
        return np.array([0.0, np.nan], np.float32)


class OutOfBounds(Good):
    """Three times what its space says, and as float64."""

    def observe(self) -> Any:
        return 3.0 * super().observe().astype(np.float64)


class Fractions(Good):
    """A camera that returns fractions in place of bytes."""

    observation_space = spaces.Box(0, 255, (4, 4, 3), np.uint8)

    def observe(self) -> Any:
        return np.full((4, 4, 3), 0.5)


class Beyond(Good):
    """A choice that there is not."""

    observation_space = spaces.Discrete(3)

    def observe(self) -> Any:
        return 3


class Parts(Good):
    """A dict of which a part is missing."""

    observation_space = spaces.Dict({"here": spaces.Discrete(2), "missing": spaces.Discrete(2)})

    def observe(self) -> Any:
        return {"here": 1}


class Unseeded(Good):
    """Draws from elsewhere."""

    def observe(self) -> Any:
        return np.random.uniform(-1, 1, 2).astype(np.float32)


class Lucky(Good):
    """Its reward is drawn from elsewhere."""

    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return observation, np.random.uniform(), *rest


class Quits(Good):
    """Leaves as a script does."""

    def step(self, action: Any) -> Any:
        raise SystemExit(3)


class OneArray(Good):
    """Writes each observation over the last one."""

    def observe(self) -> Any:
        self._array = getattr(self, "_array", np.zeros(2, np.float32))
        self._array[:] = super().observe()
        return self._array


class Chatty(Good):
    """Prints; whether from Python or below it is seen alike."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        print("a new episode")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        os.write(1, b"step\n")
        return super().step(action)


class Picky(spaces.Discrete):
    """Does not contain what it samples."""

    def contains(self, x: Any) -> bool:
        return False


class Picks(Good):
    """With such an action space."""

    action_space = Picky(2)


class Raises(Good):
    """In its second step."""

    def step(self, action: Any) -> Any:
        if self._steps == 1:
            raise ValueError("the gripper\nis stuck")
        return super().step(action)


class NoSpace(Good):
    """Forgot what it can do."""

    action_space = None  # type: ignore[assignment]


def nothing() -> None:
    """A factory that forgot to return what it has made."""


class Lavish(Good):
    """A finite reward that no fragment may hold."""

    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return observation, 3e38, *rest


class Sluggish(Good):
    """Never ends an episode, and takes its time."""

    def step(self, action: Any) -> Any:
        time.sleep(0.05)
        return super().step(action)


class Huge(Good):
    """Observes a number whose square is none."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)

    def observe(self) -> Any:
        return np.array([1e300, 0.0])


class Parting(Good):
    """Raises as it ends."""

    def close(self) -> None:
        raise OSError("no connection")


class Silent(Good):
    """Returns nothing."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)


class OfNoClass:
    """Has all that Good has, and is no gymnasium.Env."""

    observation_space, action_space = Good.observation_space, Good.action_space
    reset, step = Good.reset, Good.step


class NoLevel(Good):
    """Looks for a file that is not there."""

    def __init__(self) -> None:
        Path("level.txt").read_text()


class Hangs(Good):
    """In one call for ever, and with Python's lock or without."""

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
        print("no licence found", file=sys.stderr, flush=True)
        if self._how == "exit":
            os._exit(3)
        if self._how == "crash":
            ctypes.string_at(0)
        os.kill(os.getpid(), signal.SIGKILL)


class InTurns:
    """As PettingZoo's AEC environments look."""

    possible_agents = ["a", "b"]

    def agent_iter(self) -> Any:
        """Whose turn it is."""


class Unnamed(ParallelEnv):  # type: ignore[misc]
    """Tells its agents only after a reset."""

    agents: list[str] = []


class SilentMouse(Chase):
    """A parallel environment whose mouse is rewarded with nothing and observes what is not in its space."""

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        observations, rewards, *rest = super().step(actions)
        return observations | {"mouse": np.zeros(5, np.float32)}, rewards | {"mouse": None}, *rest
