"""Play by keyboard; each whole episode is written as recorded experience (docs/guides/offline.md: CSV)."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from stagecoach.rollout_worker.environments.description import describe
from stagecoach.rollout_worker.environments.factory import make_environment
from stagecoach.rollout_worker.environments.gymnasium_env import GuardedEnvironment
from stagecoach.rollout_worker.environments.seeding import SEEDS
from stagecoach.shared.base.errors import UserError
from stagecoach.shared.base.user_code import with_extra
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.spaces import PolicySpaces, SpaceSpec

FILE = "played.csv"


def record_play(
    config: Config, folder: Path, episodes: int, keys: Mapping[str, int], *,
    idle: int | None = None, wait: bool = False, fps: int | None = None,
) -> int:  # fmt: skip
    """Opens a window, steps the environment by `keys` (name → action; default: the environment's, else 0 to 9) and
    appends to `folder/played.csv`. Without a key pressed, the action is `idle` (default: the first one), or with `wait`
    the environment stands still. Returns the number of episodes played."""
    try:
        import pygame  # type: ignore[import-untyped, unused-ignore]
        from gymnasium.utils.play import play
    except (ImportError, gym.error.DependencyNotInstalled) as error:
        raise UserError(f"cannot open a window to play in: {with_extra(str(error))}") from None
    if config.environment.api != "gymnasium" or config.environment.hierarchy is not None:
        raise UserError(
            "--record is for one person and so for one agent; play without environment.hierarchy, and record "
            "several agents with a program (docs/guides/offline.md)"
        )
    made = make_environment(config.environment, render_mode="rgb_array")
    action = made.action_space
    if not isinstance(action, gym.spaces.Discrete):
        raise UserError(f"keys choose among the actions of a Discrete space, found {action}; record with a program")
    if made.render_mode != "rgb_array":
        raise UserError(f"{config.environment.id}: render_mode={made.render_mode}; expected rgb_array, to show it")
    first, count = int(action.start), int(action.n)
    noop = first if idle is None else idle
    if odd := {name: its for name, its in {**keys, "--idle": noop}.items() if its not in action}:
        raise UserError(f"actions are {first} to {first + count - 1}, found {odd}")
    pygame.display.init()
    try:
        codes = {(pygame.key.key_code(name),): its for name, its in keys.items()}
    except ValueError:
        raise UserError(f"--keys has {', '.join(keys)}; expected names of keys, as in left=0,right=1,space=2") from None
    if not codes and not made.has_wrapper_attr("get_keys_to_action"):
        codes = {(ord(str(number)),): first + number for number in range(min(count, 10))}
    (spaces,) = describe(config, made).policies.values()
    recorder = _Recorder(GuardedEnvironment(made, 0), spaces, folder / FILE, episodes, config.seed)
    try:
        play(recorder, keys_to_action=codes or None, fps=fps, noop=noop, wait_on_player=wait)
    finally:
        recorder.close()
    return recorder.played


class _Recorder(gym.Wrapper[Any, Any, Any, Any]):
    """Writes each episode as it ends, and closes the window after the last one."""

    def __init__(self, env: gym.Env[Any, Any], spaces: PolicySpaces, path: Path, episodes: int, seed: int) -> None:
        super().__init__(env)
        self._spaces, self._path, self._episodes = spaces, path, episodes
        self._header = [
            *_names(spaces.observation, "obs"), *_names(spaces.action, "action"), "reward", "terminated", "truncated",
            *_names(spaces.observation, "next_obs"),
        ]  # fmt: skip
        self._seed, self.played = seed + self._before(), 0
        self._rows: list[list[Any]] = []
        self._seen: Any = None

    def _before(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not self._path.exists():
            with self._path.open("w", newline="") as file:
                csv.writer(file).writerow(self._header)
            return 0
        with self._path.open(newline="") as file:
            header, *rows = csv.reader(file)
        if header != self._header:
            raise UserError(
                f"{self._path} is from another environment: its columns are {', '.join(header)}; use a new folder"
            )
        ends = [header.index(name) for name in ("terminated", "truncated")]
        return sum(any(row[end] == "1" for end in ends) for row in rows)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._rows = []
        self._seen, info = self.env.reset(seed=(self._seed + self.played) % SEEDS, options=options)
        return self._seen, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        before = _values(self._spaces.observation, self._seen)  # before the step, which may change the array
        self._seen, reward, terminated, truncated, info = self.env.step(action)
        self._rows.append([
            *before, *_values(self._spaces.action, action), float(reward), int(terminated), int(truncated),
            *_values(self._spaces.observation, self._seen),
        ])  # fmt: skip
        if terminated or truncated:
            self._write()
        return self._seen, reward, terminated, truncated, info

    def _write(self) -> None:
        import pygame

        with self._path.open("a", newline="") as file:
            csv.writer(file).writerows(self._rows)
        self.played += 1
        if self.played == self._episodes:
            pygame.event.post(pygame.event.Event(pygame.QUIT))


def _names(spec: SpaceSpec, name: str) -> list[str]:
    return [leaf.column(name) + (f".{at}" if leaf.shape else "") for leaf in spec.leaves for at in range(leaf.size)]


def _values(spec: SpaceSpec, value: Any) -> list[Any]:
    columns = spec.flatten("", value)
    return [number for leaf in spec.leaves for number in np.ravel(leaf.own_terms(columns[leaf.column("")])).tolist()]
