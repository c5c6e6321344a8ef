"""Hierarchies for tests: a short corridor with levels, and a plain loop that plays it level by level."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, NamedTuple

from benchmarks.learning.mazes import PointMaze
from rollout_worker.environments.seeding import episode_seed
from shared.experience.spaces import Array

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
