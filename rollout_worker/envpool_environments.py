"""EnvPool's environments (C++, all copies at once) behind gymnasium's interfaces: `environment.id: envpool:TASK`.

A pool takes its seed when it is made, so a reset with a seed makes another one (under a millisecond). Its copies start
again as gymnasium's NEXT_STEP does: the step after an episode's end only resets. An episode that fails in the very step
at which its limit is reached counts as truncated there.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from shared.errors import EnvironmentUnusable
from shared.extras import install
from shared.spaces import Array

PREFIX = "envpool:"
_OURS = ("num_envs", "batch_size", "seed", "env_seed", "env_type")
"""Arguments that the config has fields for, or that would change what a step is."""
_MOST_SEEDS = 2**31 - 1
_ABOUT_THE_POOL = ("env_id", "players", "elapsed_step")
"""What is in `info` beside what the environment tells."""


def is_envpool(name: str) -> bool:
    """Whether `environment.id` names a task of EnvPool."""
    return name.startswith(PREFIX)


class Pools:
    """Makes pools of one task, each with a seed."""

    def __init__(self, name: str, num_envs: int, max_episode_steps: int | None, kwargs: Mapping[str, Any]) -> None:
        """Raises `EnvironmentUnusable` where EnvPool is not installed, has no such task, or takes no such argument."""
        if taken := sorted(set(kwargs) & set(_OURS)):
            raise EnvironmentUnusable(f"environment.kwargs {taken} of {name} are Stagecoach's to set; leave them out")
        limit = {} if max_episode_steps is None else {"max_episode_steps": max_episode_steps}
        self._task, self.num_envs = name.removeprefix(PREFIX), num_envs
        self._kwargs = {"num_threads": 1, **limit, **kwargs}
        self._envpool = _imported(name)
        try:
            first = self.make(0)
            self.observation_space, self.action_space = first.observation_space, first.action_space
        except Exception as error:
            raise EnvironmentUnusable(f"{name} cannot be made: {type(error).__name__}: {error}") from error
        if first.config.get("max_num_players", 1) > 1:
            raise EnvironmentUnusable(f"{name} has several players; only tasks with a single one are supported")
        self.first = first

    def make(self, seed: int) -> Any:
        """A pool that has not been reset."""
        made = self._envpool.make(
            self._task, env_type="gymnasium", num_envs=self.num_envs, seed=seed % _MOST_SEEDS, **self._kwargs
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of bounds that a float32 rounds, at the first look
            assert made.observation_space is not None
        return made


class EnvPoolVector(gym.vector.VectorEnv[Any, Any, Array]):
    """All copies of a task: what `environment.vectorization: native` steps."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, pools: Pools) -> None:
        self.num_envs = pools.num_envs
        self.single_observation_space, self.single_action_space = pools.observation_space, pools.action_space
        self.observation_space = gym.vector.utils.batch_space(pools.observation_space, self.num_envs)
        self.action_space = gym.vector.utils.batch_space(pools.action_space, self.num_envs)
        self._pools, self._pool = pools, pools.first
        self._all = np.ones(self.num_envs, np.bool_)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        if isinstance(seed, int):
            self._pool = self._pools.make(seed)
        observations, info = self._pool.reset()
        return observations, self._of_each(info)

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        observations, reward, terminated, truncated, info = self._pool.step(actions)
        return observations, reward, terminated, truncated, self._of_each(info)

    def _of_each(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """As gymnasium's vectorised environments tell it: a number for each copy, and which of them have one."""
        told = _told(info, self.num_envs)
        return told | {f"_{name}": self._all for name in told}

    def close_extras(self, **kwargs: Any) -> None:
        self._pool.close()


class EnvPoolSingle(gym.Env[Any, Any]):
    """One copy of a task: for its spaces, and for evaluation, whose episodes have seeds."""

    def __init__(self, pools: Pools, render_mode: str | None) -> None:
        self.observation_space, self.action_space = pools.observation_space, pools.action_space
        self.render_mode = render_mode
        self._pools, self._pool = pools, pools.first

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._pool = self._pools.make(seed)
        observations, info = self._pool.reset()
        return _first(observations), _first(_told(info, 1))

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observations, reward, terminated, truncated, info = self._pool.step(_batch(action))
        return _first(observations), float(reward[0]), bool(terminated[0]), bool(truncated[0]), _first(_told(info, 1))

    def render(self) -> Any:
        frames = self._pool.render()
        return None if frames is None else frames[0]

    def close(self) -> None:
        self._pool.close()


def make_envpool(name: str, max_episode_steps: int | None, kwargs: Mapping[str, Any]) -> EnvPoolSingle:
    """One environment; raises `EnvironmentUnusable`."""
    return EnvPoolSingle(Pools(name, 1, max_episode_steps, kwargs), kwargs.get("render_mode"))


def make_envpool_vector(
    name: str, num_envs: int, max_episode_steps: int | None, kwargs: Mapping[str, Any]
) -> EnvPoolVector:
    """`num_envs` of them; raises `EnvironmentUnusable`."""
    return EnvPoolVector(Pools(name, num_envs, max_episode_steps, kwargs))


def _imported(name: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import envpool
    except ImportError as error:
        raise EnvironmentUnusable(
            f"{name} needs EnvPool, which cannot be imported ({error}); {install('envpool')} (750 MB)"
        ) from None
    return envpool


def _first(nested: Any) -> Any:
    return {key: _first(value) for key, value in nested.items()} if isinstance(nested, dict) else nested[0]


def _batch(nested: Any) -> Any:
    return {k: _batch(v) for k, v in nested.items()} if isinstance(nested, dict) else np.asarray(nested)[None]


def _told(info: Mapping[str, Any], copies: int) -> dict[str, Any]:
    """What the environments tell: of each copy a number."""
    return {
        name: values for name, values in info.items() if name not in _ABOUT_THE_POOL and np.shape(values) == (copies,)
    }
