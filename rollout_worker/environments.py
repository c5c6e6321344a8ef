"""Vectorised environments: which one the config asks for, and gymnasium's own (sync, async, native)."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from rollout_worker.making import PAST, RETURN, Guarded, failure, make, make_native
from rollout_worker.parallel_environments import ParallelEnvironments
from rollout_worker.trail import Past, episode_seed
from rollout_worker.vector import Place, PolicyStep, Step, VectorEnvironment, episode_record, pick, scalar
from shared.child import end_with_parent, forget_secrets
from shared.config import EnvironmentConfig
from shared.errors import EnvironmentFailure
from shared.fragment import EpisodeRecord
from shared.spaces import Array, Columns, EnvironmentDescription

_LOGGER = logging.getLogger("stagecoach.worker")


def make_vector(config: EnvironmentConfig, description: EnvironmentDescription) -> VectorEnvironment:
    """The vectorised environment that the config asks for."""
    if config.api == "pettingzoo":
        return ParallelEnvironments(config, description)
    return GymnasiumEnvironments(config, description)


class GymnasiumEnvironments:
    """Gymnasium environments behind gymnasium's own vectorisation: sync, async or native."""

    def __init__(self, config: EnvironmentConfig, description: EnvironmentDescription) -> None:
        ((_, self._policy),) = description.agents.items()
        self._spaces = description.policies[self._policy]
        self.num_envs = config.num_envs
        self._native = config.vectorization == "native"
        self._env = _vectorise(config)
        self._mode = AutoresetMode(self._env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        self._over = np.zeros(self.num_envs, np.bool_)
        self._returns = np.zeros(self.num_envs)
        self._lengths = np.zeros(self.num_envs, np.int64)
        self._seeds: Sequence[int] = ()
        self._episodes = np.zeros(self.num_envs, np.int64)
        self._everyone = np.ones(self.num_envs, np.bool_)
        self._no_slots = np.zeros(0, np.int32)
        self._no_final = {
            leaf.column("final_obs"): np.zeros((0, *leaf.shape), leaf.column_dtype)
            for leaf in self._spaces.observation.leaves
        }

    def reset(self, seeds: Sequence[int], past: Past | None = None) -> dict[str, tuple[Columns, Array]]:
        self._seeds = seeds
        self._episodes[:] = past.episodes if past else 0
        self._lengths[:] = past.lengths if past else 0
        try:
            if self._native:  # one source of randomness for all copies: it takes one seed
                observations, infos = self._env.reset(seed=seeds[0])
            else:
                options = {PAST: self._actions_done(past)} if past else None
                every = self._episode_seeds(range(self.num_envs))
                observations, infos = self._env.reset(seed=every, options=options)
        except EnvironmentFailure:
            raise
        except Exception as error:
            raise failure(None, "reset", error) from None
        self._over[:] = False
        self._returns[:] = infos[RETURN] if past else 0
        obs = self._spaces.observation.flatten("obs", observations)
        return {self._policy: (obs, np.ones(self.num_envs, np.bool_))}

    @property
    def place(self) -> Place | None:
        if self._native:
            return None
        return Place(tuple(self._episodes.tolist()), tuple(self._lengths.tolist()), self._returns)

    def _episode_seeds(self, which: Iterable[int]) -> Any:
        """A seed for each environment of `which`, None for the others."""
        seeds: list[int | None] = [None] * self.num_envs
        for index in which:
            seeds[index] = episode_seed(self._seeds[index], int(self._episodes[index]))
        return seeds

    def _actions_done(self, past: Past) -> list[list[Any]]:
        """Per environment, the actions of its running episode, as it takes them."""
        done = []
        for index in range(self.num_envs):
            _, first, last = past.of(index)
            columns = {name: array[first:last, index] for name, array in past.actions[self._policy].items()}
            nested = self._spaces.action.to_environment(columns)
            done.append([pick(nested, row) for row in range(last - first)])
        return done

    def step(self, actions: Mapping[str, Columns]) -> Step:
        try:
            return self._step(self._spaces.action.to_environment(actions[self._policy]))
        except EnvironmentFailure:
            raise
        except Exception as error:
            raise failure(None, "step", error) from None

    def _step(self, actions: Any) -> Step:
        observations, rewards, terminated, truncated, infos = self._env.step(actions)
        mask = self._everyone
        if self._mode is AutoresetMode.NEXT_STEP and self._over.any():  # they only start again
            mask = ~self._over
            rewards, terminated, truncated = np.where(mask, rewards, 0.0), terminated & mask, truncated & mask
        self._returns += rewards
        self._lengths += 1 if mask is self._everyone else mask
        done = terminated | truncated
        final, final_slots = self._no_final, self._no_slots
        episodes: list[tuple[int, EpisodeRecord]] = []
        if len(ended := done.nonzero()[0]):
            final_slots = ended.astype(np.int32)
            final = self._final_obs(observations, infos, final_slots)
            episodes = self._records(ended, infos)
            self._returns[ended] = 0
            self._lengths[ended] = 0
            self._episodes[ended] += 1
            if self._mode is AutoresetMode.DISABLED:
                terminated, truncated = terminated.copy(), truncated.copy()  # a reset may write into its own
                seeds = None if self._native else self._episode_seeds(ended.tolist())
                observations, _ = self._env.reset(seed=seeds, options={"reset_mask": done})
        self._over = done
        step = PolicyStep(
            self._spaces.observation.flatten("obs", observations),
            np.asarray(rewards, np.float32), terminated, truncated, mask, final, final_slots,
        )  # fmt: skip
        return Step({self._policy: step}, episodes)

    def _final_obs(self, observations: Any, infos: dict[str, Any], slots: Array) -> Columns:
        if self._mode is AutoresetMode.SAME_STEP:
            rows = [self._spaces.observation.flatten("final_obs", infos["final_obs"][i]) for i in slots]
            return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        return {
            name: array[slots] for name, array in self._spaces.observation.flatten("final_obs", observations).items()
        }

    def _records(self, ended: Array, infos: dict[str, Any]) -> list[tuple[int, EpisodeRecord]]:
        """Of the environments in which an episode has ended; a thousand copies end some in nearly every step."""
        if self._mode is AutoresetMode.SAME_STEP:
            infos = infos.get("final_info", {})
        told = [
            (name, values, infos[f"_{name}"])
            for name, values in infos.items()
            if f"_{name}" in infos and np.ndim(values) == 1
        ]
        records = []
        for index, total, length in zip(
            ended.tolist(), self._returns[ended].tolist(), self._lengths[ended].tolist(), strict=True
        ):
            metrics: dict[str, float] = {}
            for name, values, present in told:
                if present[index]:
                    metrics |= scalar(name, values[index])
            records.append((index, episode_record(total, length, metrics)))
        return records

    def close(self) -> None:
        try:
            self._env.close()
        except Exception as error:  # such as a process of theirs that has died: nobody is there to say good-bye to
            _LOGGER.warning("closing the environments failed: %s: %s", type(error).__name__, error)
            for process in getattr(self._env, "processes", ()):
                process.kill()
                process.join()
            self._env.closed = True


def _vectorise(config: EnvironmentConfig) -> gym.vector.VectorEnv[Any, Any, Any]:
    if config.vectorization == "native":
        return make_native(config)
    if config.vectorization == "async":  # spawn: forking a process that has threads can hang it
        makers = [partial(_in_own_process, config, index) for index in range(config.num_envs)]
        made = gym.vector.AsyncVectorEnv(makers, context="spawn", autoreset_mode=AutoresetMode.DISABLED)
        # What a process raises is told by `failure`; gymnasium's log would tell it too, and break on a '%' in it.
        gym.logger.min_level = gym.logger.ERROR + 1
        return made
    makers = [partial(_guarded, config, index) for index in range(config.num_envs)]
    return gym.vector.SyncVectorEnv(makers, copy=False, autoreset_mode=AutoresetMode.DISABLED)


def _guarded(config: EnvironmentConfig, index: int) -> Guarded:
    return Guarded(make(config), index)


def _in_own_process(config: EnvironmentConfig, index: int) -> Guarded:
    """An environment that hangs does not see that its worker is gone; the kernel ends it then.

    It may read files of its own with the keys of the store, but what it starts needs neither Redis nor Ray.
    """
    end_with_parent(signal.SIGKILL)()
    forget_secrets("store")
    return _guarded(config, index)
