"""Hierarchies for tests: a short corridor with levels or options, and plain loops that play it."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np

from benchmarks.learning.mazes import PointMaze
from stagecoach.rollout_worker.environments.seeding import episode_seed
from stagecoach.shared.experience.spaces import Array, Columns

THREE: list[dict[str, Any]] = [
    {"policy": "top", "reward": "sparse", "threshold": 0.5},
    {"policy": "middle", "every": 2, "threshold": 0.4},
    {"policy": "bottom", "every": 3, "threshold": [0.4, 0.3]},
]
CORRIDOR: dict[str, Any] = {"rows": 1, "length": 3, "steps": 17}


def corridor(levels: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The environment's section."""
    hierarchy = {"levels": levels, "test_subgoals": more.pop("test_subgoals", 0.0)}
    return {"id": "benchmarks.learning.mazes:PointMaze", "kwargs": CORRIDOR, "hierarchy": hierarchy} | more


def with_options(name: str = "ppo", **more: Any) -> dict[str, Any]:
    """Sections of a run with options in it: two rewards of functions, the environment's, and a number of `info`."""
    ways = ["benchmarks.learning.mazes:east", "benchmarks.learning.mazes:north", "environment", "is_success"]
    environment = {
        "id": "benchmarks.learning.mazes:PointMaze", "kwargs": CORRIDOR | {"choices": True}, "num_envs": 2,
        "hierarchy": {"options": {"rewards": ways, "lengths": [1, 4]}},
    } | more  # fmt: skip
    return {"environment": environment, "policies": {"default": {"hidden_sizes": [8]}}} | {
        "algorithm": {"name": name, "minibatch_size": 8}, "rollout": {"fragment_steps": 32, "fragments_per_update": 1}
    }  # fmt: skip


def off_policy(name: str = "td3", test_subgoals: float = 0.4) -> dict[str, Any]:
    """Sections of a run of three levels that learn as in hierarchical actor-critic."""
    policies = {}
    for number, level in enumerate(THREE):
        buffer = {"kind": "hindsight", "threshold": level["threshold"], "terminates": True, "capacity": 2000}
        if level["policy"] != "bottom":
            buffer |= {"hindsight_actions": True}
            buffer |= {"missed_penalty": THREE[number + 1]["every"]} if test_subgoals else {}
        policies[level["policy"]] = {"hidden_sizes": [8], "algorithm": {"replay_buffer": buffer}}
    algorithm = {"name": name, "minibatch_size": 8, "gradient_steps_per_env_step": 0.1}
    environment = corridor(THREE, test_subgoals=test_subgoals, num_envs=2)
    return {"environment": environment, "policies": policies, "algorithm": algorithm} | {
        "rollout": {"fragment_steps": 32, "fragments_per_update": 1}
    }


def recorded(columns: Columns, slot: int) -> list[tuple[Any, ...]]:
    """Content of a fragment's slot: observation, action, reward, end, and bootstrap observation."""
    names = [name for name in columns if name.startswith("obs")]
    finals = {(step, at): row for row, (step, at) in enumerate(columns["final_index"].tolist())}
    rows = []
    for step in np.flatnonzero(columns["mask"][:, slot]).tolist():
        flags = [bool(columns[name][step, slot]) for name in ("terminated", "truncated")]
        last, final = step + 1 == len(columns["mask"]), finals.get((step, slot))
        after = [
            columns["final_" + name][final]
            if final is not None
            else columns["bootstrap_" + name][slot]
            if last
            else columns[name][step + 1, slot]
            for name in names
        ]
        seen = [columns[name][step, slot] for name in names]
        rows.append(
            (
                listed(seen),
                listed([columns[name][step, slot] for name in sorted(columns) if name.startswith("action")]),
                float(columns["reward"][step, slot]),
                *flags,
                listed(after),
            )
        )
    return rows


def listed(arrays: list[Array]) -> list[list[float]]:
    return [np.asarray(array, np.float32).tolist() for array in arrays]


class Turn(NamedTuple):
    """A transition of a level; `began` and `known`: turns of all levels before it was acted, and was told."""

    began: int
    known: int
    seen: dict[str, Array]
    action: Array
    reward: float
    terminated: bool
    truncated: bool
    after: dict[str, Array]


class PlainLevels:
    """Plays levels by recursion: an action of a level is all that the level below does for it."""

    def __init__(self, levels: list[dict[str, Any]], act: Any, seed: int) -> None:
        self._levels, self._act, self._seed = levels, act, seed
        self._env = PointMaze(**CORRIDOR)
        self.turns: dict[str, list[Turn]] = defaultdict(list)
        self.count = 0

    def play(self, turns: int) -> dict[str, list[Turn]]:
        """Episodes, until so many turns have been acted."""
        episode = 0
        while self.count < turns:
            self._seen, _ = self._env.reset(seed=episode_seed(self._seed, episode))
            self._goals: list[Any] = [self._seen["desired_goal"]]
            self._over = False
            self._level(0)
            episode += 1
        return self.turns

    def _shown(self, number: int) -> dict[str, Array]:
        seen = {"achieved_goal": self._seen["achieved_goal"], "desired_goal": self._goals[number]}
        below = {"achieved_below": self._seen["achieved_goal"]} if number + 1 < len(self._levels) else {}
        return {"observation": self._seen["observation"], **seen, **below}

    def _achieved(self, number: int) -> bool:
        apart = self._seen["achieved_goal"].astype(float) - self._goals[number]
        threshold = self._levels[number]["threshold"]
        if isinstance(threshold, list):
            return all(abs(one) <= most for one, most in zip(apart, threshold, strict=True))
        return math.hypot(*apart) <= float(threshold)

    def _level(self, number: int) -> None:
        """Acts until its goal is achieved, its time is over, or it is over for a level above."""
        for attempt in range(1, self._levels[number].get("every", 10**9) + 1):
            began, seen = self.count, self._shown(number)
            action = self._act(seen)
            self.count += 1
            if number + 1 < len(self._levels):
                self._goals.append(action)
                self._level(number + 1)
                self._goals.pop()
            else:
                self._seen, _, terminated, truncated, _ = self._env.step(action)
                self._over = terminated or truncated
            achieved = self._achieved(number)
            above = any(self._achieved(higher) for higher in range(number))
            out_of_time = attempt == self._levels[number].get("every")
            cut = not achieved and (out_of_time or above or self._over)
            turn = Turn(began, self.count - 1, seen, action, float(achieved) - 1, achieved, cut, self._shown(number))
            self.turns[self._levels[number]["policy"]].append(turn)
            if achieved or cut:
                return


class PlainOptions:
    """Plays options by two loops. `act` is told an observation and who acts; it returns the environment's action, the
    number of the length, and that of the option."""

    def __init__(self, act: Any, seed: int) -> None:
        self._act, self._seed, self._env = act, seed, PointMaze(**CORRIDOR, choices=True)
        self.turns: dict[str, list[Turn]] = defaultdict(list)
        self.count = 0

    def play(self, turns: int) -> dict[str, list[Turn]]:
        """Episodes, until so many turns have been acted."""
        episode = 0
        while self.count < turns:
            seen, over = self._env.reset(seed=episode_seed(self._seed, episode))[0], False
            episode += 1
            while not over:
                began, first, total = self.count, seen, 0.0
                chosen = self._act(seen, 4)
                self.count += 1
                for left in reversed(range((1, 4)[chosen[1]])):
                    acted, before, does = self.count, seen, self._act(seen, chosen[2])
                    self.count += 1
                    seen, reward, terminated, truncated, info = self._env.step(does[0])
                    over = terminated or truncated
                    moved = seen["observation"] - before["observation"]
                    aside = np.abs(moved)
                    paid = (moved[0] - aside[1], moved[1] - aside[0], reward, info["is_success"])[chosen[2]]
                    cut = not terminated and (truncated or left == 0)
                    turn = Turn(acted, self.count - 1, before, does, float(paid), terminated, cut, seen)
                    self.turns["option"].append(turn)
                    total += reward
                    if over:
                        break
                turn = Turn(began, self.count - 1, first, chosen, total, terminated, truncated, seen)
                self.turns["controller"].append(turn)
        return self.turns
