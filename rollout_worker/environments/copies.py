"""Copies of a Gymnasium environment, stepped in turn: `environment.vectorization: sync`."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import concatenate, iterate

from stagecoach.shared.experience.spaces import Array


class Copies(gym.vector.SyncVectorEnv):
    """Gymnasium's `SyncVectorEnv` without autoreset and copies of the observations, in a loop that costs less.

    Observations are valid until the next call. An environment that has ended is stepped on unless it is reset.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._env_obs: list[Any]
        space = self.single_observation_space
        self._rows: Array | None = None
        """The buffer of observations with the copies one below the other, if they are single arrays."""
        if type(space) is gym.spaces.Box and space.shape:
            self._rows = self._observations.reshape(-1, *space.shape[1:])
            self._lengths = [space.shape[0]] * self.num_envs

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        infos: dict[str, Any] = {}
        rewards, terminated, truncated, seen = [], [], [], self._env_obs
        for index, (env, action) in enumerate(zip(self.envs, iterate(self.action_space, actions), strict=True)):
            seen[index], reward, ended, cut, info = env.step(action)
            rewards.append(reward)
            terminated.append(ended)
            truncated.append(cut)
            if info:
                infos = self._add_info(infos, info, index)
        self._collect()
        flags = np.array([terminated, truncated], np.bool_)
        return self._observations, np.array(rewards, np.float64), flags[0], flags[1], infos

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Resets the environments where `options["reset_mask"]` is true, or all, with a seed for each."""
        own = dict(options or {})
        which = own.pop("reset_mask", None)
        infos: dict[str, Any] = {}
        for index in range(self.num_envs) if which is None else which.nonzero()[0].tolist():
            self._env_obs[index], info = self.envs[index].reset(seed=seed[index], options=own or None)
            infos = self._add_info(infos, info, index)
        self._collect()
        return self._observations, infos

    def _collect(self) -> None:
        """Writes the last observation of each copy into the buffer."""
        if self._rows is None or [*map(len, self._env_obs)] != self._lengths:  # it raises where a length is wrong
            self._observations = concatenate(self.single_observation_space, self._env_obs, self._observations)
        else:
            np.concatenate(self._env_obs, out=self._rows)
