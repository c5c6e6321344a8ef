"""EnvPool environments (C++, all copies at once) behind Gymnasium's interfaces: `environment.id: envpool:TASK`.

A pool is seeded when it is created, so a reset with a seed creates another one (under a millisecond). Its copies reset
as Gymnasium's NEXT_STEP: the step after an episode's end only resets. An episode that fails in the step in which it
reaches its limit counts as truncated.
"""

import importlib
import warnings
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from stagecoach.shared.base.errors import EnvironmentUnusable
from stagecoach.shared.base.user_code import install
from stagecoach.shared.experience.spaces import Array

PREFIX = "envpool:"
_OURS = ("num_envs", "batch_size", "seed", "env_seed", "env_type")
"""Arguments that the config has fields for, or that would change the meaning of a step."""
_MOST_SEEDS = 2**31 - 1
_ABOUT_THE_POOL = ("env_id", "players", "elapsed_step")
"""Entries of `info` that EnvPool adds to the environment's."""


class EnvPoolVector(gym.vector.VectorEnv[Any, Any, Array]):
    """All copies of a task, for `environment.vectorization: native`."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, name: str, num_envs: int, max_episode_steps: int | None, kwargs: Mapping[str, Any]) -> None:
        """Raises `EnvironmentUnusable` if EnvPool is not installed, or does not have the task or an argument."""
        if taken := sorted(set(kwargs) & set(_OURS)):
            raise EnvironmentUnusable(f"environment.kwargs {taken} of {name} are Stagecoach's to set; leave them out")
        limit = {} if max_episode_steps is None else {"max_episode_steps": max_episode_steps}
        self._kwargs = {"num_threads": 1, "num_envs": num_envs, **limit, **kwargs}
        self._task = name.removeprefix(PREFIX)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._envpool = importlib.import_module("envpool")
        except ImportError as error:
            raise EnvironmentUnusable(
                f"{name} needs EnvPool, which cannot be imported ({error}); {install('envpool')} (750 MB)"
            ) from None
        try:
            self.pool = self._make(0)
            self.single_observation_space = self.pool.observation_space
            self.single_action_space = self.pool.action_space
        except Exception as error:
            raise EnvironmentUnusable(f"{name} cannot be created: {type(error).__name__}: {error}") from error
        if self.pool.config.get("max_num_players", 1) > 1:
            raise EnvironmentUnusable(f"{name} has several players; only tasks with a single one are supported")
        self.num_envs = num_envs
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def _make(self, seed: int) -> Any:
        made = self._envpool.make(self._task, env_type="gymnasium", seed=seed % _MOST_SEEDS, **self._kwargs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about bounds that float32 rounds, at the first access
            assert made.observation_space is not None
        return made

    def begin(self, seed: object) -> tuple[Any, dict[str, Any]]:
        """Resets, with a seed in a new pool; returns observations and info."""
        if isinstance(seed, int):
            self.pool = self._make(seed)
        observations, info = self.pool.reset()
        return observations, _own_info(info, self.num_envs)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        observations, info = self.begin(seed)
        return observations, self._masked(info)

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        *result, info = self.pool.step(actions)
        return *result, self._masked(info)

    def _masked(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the info as Gymnasium's vectorized environments have it: values per copy, with masks."""
        own = _own_info(info, self.num_envs)
        return own | dict.fromkeys((f"_{name}" for name in own), np.ones(self.num_envs, np.bool_))

    def close_extras(self, **kwargs: Any) -> None:
        self.pool.close()


class EnvPoolSingle(gym.Env[Any, Any]):
    """One copy of a task, to read its spaces and for evaluation, whose episodes have seeds."""

    def __init__(self, name: str, max_episode_steps: int | None, kwargs: Mapping[str, Any]) -> None:
        self._one = EnvPoolVector(name, 1, max_episode_steps, kwargs)
        self.observation_space, self.action_space = self._one.single_observation_space, self._one.single_action_space
        self.render_mode = kwargs.get("render_mode")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        observations, info = self._one.begin(seed)
        return _first(observations), _first(info)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observations, reward, terminated, truncated, info = self._one.pool.step(_batch(action))
        ends = bool(terminated[0]), bool(truncated[0])
        return _first(observations), float(reward[0]), *ends, _first(_own_info(info, 1))

    def render(self) -> Any:
        frames = self._one.pool.render()
        return None if frames is None else frames[0]

    def close(self) -> None:
        self._one.close()


def _first(nested: Any) -> Any:
    return {key: _first(value) for key, value in nested.items()} if isinstance(nested, dict) else nested[0]


def _batch(nested: Any) -> Any:
    return {k: _batch(v) for k, v in nested.items()} if isinstance(nested, dict) else np.asarray(nested)[None]


def _own_info(info: Mapping[str, Any], copies: int) -> dict[str, Any]:
    return {name: value for name, value in info.items() if name not in _ABOUT_THE_POOL and np.shape(value) == (copies,)}
