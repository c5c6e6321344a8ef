"""Environments with goals for the kit's hierarchies: a maze that one moves through as a point, and Pendulum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from stagecoach.shared.experience.spaces import Array

_MOVES = np.array([[0.5, 0], [-0.5, 0], [0, 0.5], [0, -0.5]], np.float32)


class PointMaze(gym.Env[dict[str, Any], Any]):
    """A corridor that folds back and forth: `rows` of it, each `length` long and 1 wide, joined at alternating ends.

    One begins in the first row's beginning and is to come within `near` of the goal, in the last row's end, by moves of
    at most half a unit each way, or with `choices` of half a unit in one of four directions. A wall stops a move. It is
    `wall` wide: without width, almost the same place is seen on both of its sides. The reward is 1 there, else 0.
    """

    def __init__(
        self,
        rows: int = 3,
        length: int = 6,
        near: float = 0.5,
        steps: int = 200,
        choices: bool = False,
        wall: float = 0.0,
    ) -> None:
        self._rows, self._length, self._near, self._most, self._wall = rows, length, near, steps, wall
        high = np.array([length, rows], np.float32)
        place = gym.spaces.Box(np.zeros(2, np.float32), high, dtype=np.float32)
        self.observation_space = gym.spaces.Dict({"observation": place, "achieved_goal": place, "desired_goal": place})
        moves = gym.spaces.Box(-0.5, 0.5, (2,), np.float32)
        self.action_space: gym.Space[Any] = gym.spaces.Discrete(4) if choices else moves
        self._goal = np.array([length - 0.5 if rows % 2 else 0.5, rows - 0.5], np.float32)
        self._place, self._steps = np.zeros(2, np.float32), 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._place = self.np_random.uniform([0.1, 0.1], [0.9, 0.9]).astype(np.float32)
        self._steps = 0
        return self._observed(), {}

    def step(self, action: Any) -> Any:
        if isinstance(self.action_space, gym.spaces.Discrete):
            action = _MOVES[action]
        self._place = self._moved(np.clip(np.asarray(action, np.float32), -0.5, 0.5))
        self._steps += 1
        there = bool(np.linalg.norm(self._place - self._goal) <= self._near)
        over = self._steps >= self._most
        return self._observed(), float(there), there, over and not there, {"is_success": there}

    def _moved(self, move: Array) -> Array:
        """Along x first, then along y, where there is a way."""
        x = np.clip(self._place[0] + move[0], 0, self._length)
        row = int(min(self._place[1], self._rows - 1e-3))
        low = row + self._wall / 2 if row and not self._door(row - 1, x) else 0
        high = self._rows if row == self._rows - 1 or self._door(row, x) else row + 1 - max(self._wall / 2, 1e-3)
        return np.array([x, np.clip(self._place[1] + move[1], low, high)], np.float32)

    def _door(self, row: int, x: float) -> bool:
        """Whether a way leads from a row into the next one there."""
        return bool(x >= self._length - 1 if row % 2 == 0 else x <= 1)

    def _observed(self) -> dict[str, Any]:
        return {
            "observation": self._place.copy(),
            "achieved_goal": self._place.copy(),
            "desired_goal": self._goal.copy(),
        }


def _gone(before: Mapping[str, Any], after: Mapping[str, Any], axis: int, sign: int) -> float:
    """How far a step went one way, less how far aside: else an option would walk around a wall to go its way later."""
    moved = after["observation"] - before["observation"]
    return float(sign * moved[axis] - abs(moved[1 - axis]))


def east(before: Mapping[str, Any], action: Any, after: Mapping[str, Any], info: Mapping[str, Any]) -> float:
    """The rewards of options in the maze, each for one direction."""
    return _gone(before, after, 0, 1)


def west(before: Mapping[str, Any], action: Any, after: Mapping[str, Any], info: Mapping[str, Any]) -> float:
    return _gone(before, after, 0, -1)


def north(before: Mapping[str, Any], action: Any, after: Mapping[str, Any], info: Mapping[str, Any]) -> float:
    return _gone(before, after, 1, 1)


def south(before: Mapping[str, Any], action: Any, after: Mapping[str, Any], info: Mapping[str, Any]) -> float:
    return _gone(before, after, 1, -1)


class PendulumGoal(gym.Env[dict[str, Any], Any]):
    """Pendulum that is to be upright and at rest at once (Levy et al. 2019): the reward is 0 there, else -1."""

    def __init__(self, near: float = 0.2, slow: float = 1.0) -> None:
        self._env = gym.make("Pendulum-v1", max_episode_steps=-1)
        state = gym.spaces.Box(np.array([-1, -1, -8], np.float32), np.array([1, 1, 8], np.float32))
        goal = gym.spaces.Box(np.array([-np.pi, -8], np.float32), np.array([np.pi, 8], np.float32))
        self.observation_space = gym.spaces.Dict({"observation": state, "achieved_goal": goal, "desired_goal": goal})
        self.action_space = self._env.action_space
        self._bounds = np.array([near, slow])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        seen, _ = self._env.reset(seed=seed)
        return self._observed(seen), {}

    def step(self, action: Any) -> Any:
        seen, _, _, _, _ = self._env.step(action)
        observed = self._observed(seen)
        there = bool((np.abs(observed["achieved_goal"]) <= self._bounds).all())
        return observed, float(there) - 1, there, False, {"is_success": there}

    def _observed(self, seen: Any) -> dict[str, Any]:
        angle = np.array([np.arctan2(seen[1], seen[0]), seen[2]], np.float32)
        return {
            "observation": np.asarray(seen, np.float32),
            "achieved_goal": angle,
            "desired_goal": np.zeros(2, np.float32),
        }
