"""Environments whose episodes have parameters, and that say which they were given."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode
from pettingzoo import ParallelEnv

from benchmarks.learning.mazes import PointMaze
from tests.support.environments.games import InTurns

MODULE = "tests.support.environments.lessons"


class Corridor(gym.Env[Any, Any]):
    """`length` steps to the right are a success; the last step tells what it was given, as numbers of its info."""

    reset_options: tuple[str, ...] = ("length", "wind")

    def __init__(self, length: float = 2, wind: float = 0.0, render_mode: str | None = None) -> None:
        self.observation_space, self.action_space = spaces.Box(0, 100, (3,), np.float32), spaces.Discrete(2)
        self.length, self.wind = length, wind

    def _seen(self) -> Any:
        return np.array([self.at, self.length, self.wind], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        for name, value in (options or {}).items():
            setattr(self, name, value)
        self.at = self.steps = 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        self.at = max(0, self.at + (1 if action else -1))
        won, over = self.at >= self.length, self.steps >= 3 * self.length
        told = {"is_success": won, "given": float(self.length), "blown": float(self.wind)}
        return self._seen(), float(won), won, over and not won, told


class Poles(CartPoleVectorEnv):
    """Gymnasium's own vectorized CartPole, whose poles have the option `length` each, and whose resets are left to
    others."""

    metadata = CartPoleVectorEnv.metadata | {"autoreset_mode": AutoresetMode.DISABLED}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        options = dict(options or {})
        begin = options.pop("reset_mask", np.ones(self.num_envs, np.bool_))
        if "length" in options:
            length: Any = np.where(begin, options["length"], self.length)
            vars(self).update(length=length, polemass_length=self.masspole * length)
        before: Any = (self.state, self.steps)
        found, _ = super().reset(seed=seed)
        if before[0] is None:
            return found, {}
        now: Any = (self.state, self.steps)
        state, steps = (np.where(begin, *both) for both in zip(now, before, strict=True))
        vars(self).update(state=state, steps=steps)
        return state.T.astype(np.float32), {}

    def step(self, action: Any) -> Any:
        observations, rewards, terminated, truncated, _ = super().step(action)
        self.prev_done[:] = False
        told = {"given": np.asarray(self.length, np.float64), "_given": np.ones(self.num_envs, np.bool_)}
        return observations, rewards, terminated, truncated, told


def poles(num_envs: int | None = None) -> Any:
    return gym.make("CartPole-v1") if num_envs is None else Poles(num_envs)


class Open(Corridor):
    """Counts instances that are not closed; one of length 3 breaks."""

    there = 0

    def __init__(self, length: float = 2) -> None:
        super().__init__(length)
        Open.there += 1
        self.closed = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if self.length == 3:
            raise OSError("no corridor of 3")
        return super().reset(seed=seed)

    def close(self) -> None:
        Open.there -= not self.closed
        self.closed = True


class Maze(PointMaze):
    """Truncates an episode after the option `steps`."""

    reset_options = ("steps",)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._most = (options or {}).get("steps", self._most)
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        *found, told = super().step(action)
        return (*found, told | {"given": float(self._most)})


class Slot(Corridor):
    """Level k pays for action k % 2 alone, in one step; `noise` pays anything."""

    reset_options = ("level",)
    level = 0

    def step(self, action: Any) -> Any:
        return self._seen(), float(action == self.level % 2), True, False, {}


class Pair(ParallelEnv):  # type: ignore[misc]
    """Two agents, for as many steps as the option `length` says."""

    metadata = {"name": "pair"}
    possible_agents = ["ann", "bob"]
    render_mode = None
    length = 2

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(0, 100, (2,), np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(2)

    def _each(self, value: Any) -> dict[str, Any]:
        return dict.fromkeys(self.possible_agents, value)

    def _seen(self) -> dict[str, Any]:
        return self._each(np.array([self.steps, self.length], np.float32))

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.agents, self.steps = list(self.possible_agents), 0
        self.length = (options or {}).get("length", self.length)
        return self._seen(), self._each({})

    def step(self, actions: dict[str, Any]) -> Any:
        self.steps += 1
        over = self.steps >= self.length
        self.agents = [] if over else self.agents
        told = self._each({"given": float(self.length)})
        return self._seen(), {"ann": 1.0, "bob": 0.5}, self._each(over), self._each(False), told


class TurnsWithLuck(InTurns):
    """Shows its agents the attribute `luck_of`."""

    luck_of = 0.0

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        super().reset(seed, options)
        self.luck = self.luck_of
