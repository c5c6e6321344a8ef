"""Copies of an environment: stepped in turn (`environment.vectorization: sync`), or in a process each (`async`).

With several agents, each process steps one copy as the worker would step all of them. Seeds are the same too, so
fragments are equal bit for bit. Gymnasium's vectorization starts, calls and ends the processes.
"""

import multiprocessing
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import concatenate, iterate

from stagecoach.rollout_worker.environments.gymnasium_env import close_vector
from stagecoach.rollout_worker.environments.parameters import EpisodeParameters
from stagecoach.rollout_worker.environments.vector_env import NamedFailures, PolicyStep, Position, RunningEpisodes, Step
from stagecoach.shared.base.process import end_with_parent, forget_secrets
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.experience.spaces import Array, Columns


class Copies(gym.vector.SyncVectorEnv):
    """Gymnasium's `SyncVectorEnv` without autoreset and without copies of the observations, which are valid until the
    next call. An environment that has ended is stepped on unless it is reset."""

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
        if self._rows is None or [*map(len, self._env_obs)] != self._lengths:  # it raises where a length is wrong
            self._observations = concatenate(self.single_observation_space, self._env_obs, self._observations)
        else:
            np.concatenate(self._env_obs, out=self._rows)


def confine() -> None:
    """Confines a process that steps an environment. The kernel ends it with its worker, also while it hangs. It keeps
    the keys of the store, since it may read files there; its children need neither Redis nor Ray."""
    if multiprocessing.parent_process() is not None:  # gymnasium makes one in the worker too, to read its spaces
        end_with_parent(signal.SIGKILL)()
    forget_secrets("store")


class InOwnProcess(gym.Env[Any, Any]):
    """Environment `index` of `count`, which takes its part of arguments for all of them."""

    observation_space = action_space = gym.spaces.Discrete(1)  # required by gymnasium, never used

    def __init__(self, make: Callable[[EpisodeParameters | None], Any], index: int, count: int) -> None:
        self._make, self._index, self._count = make, index, count
        self._env: Any = None
        self._parameters: EpisodeParameters | None = None

    def ask(self, name: str, arguments: Sequence[Any], drawing: EpisodeParameters | None) -> tuple[Any, Any, Any]:
        """Calls a method; returns its result, the position and the drawn parameters. `drawing`: if it changed."""
        if drawing is not None:
            self._parameters = self._parameters or EpisodeParameters(drawing.table, 1)
            self._parameters.table, self._parameters.now[0] = drawing.table, drawing.now[self._index]
        if self._env is None:
            confine()
            self._env = self._make(self._parameters)
        answer = getattr(self._env, name)(*map(self._mine, arguments))
        return answer, self._env.position, self._parameters and self._parameters.now[0]

    def _mine(self, argument: Any) -> Any:
        if isinstance(argument, RunningEpisodes):
            number, length = argument.episodes[self._index], argument.lengths[self._index]
            return RunningEpisodes((number,), (length,), self._slots(argument.actions, (slice(None),)))
        if isinstance(argument, Mapping):
            return self._slots(argument, ())
        return [argument[self._index]] if isinstance(argument, list) else argument

    def _slots(self, actions: Mapping[str, Columns], before: tuple[slice, ...]) -> dict[str, Columns]:
        mine = (*before, slice(self._index, None, self._count))
        return {policy_id: {name: array[mine] for name, array in its.items()} for policy_id, its in actions.items()}

    def close(self) -> None:
        if self._env is not None:
            self._env.close()


class OwnProcesses:
    """Copies in a process each. Slot = number of the agent within its policy × N + environment, as in `Parallel`."""

    def __init__(self, env: gym.vector.AsyncVectorEnv, parameters: EpisodeParameters | None) -> None:
        """Owns `env` from now on. Its copies are `InOwnProcess`, which make their environments at the first call."""
        self._env, self.num_envs, self._parameters = env, env.num_envs, parameters
        self._sent: Any = None
        self._positions: list[Position] = []

    def _ask(self, name: str, *arguments: Any) -> list[Any]:
        drawing = self._parameters
        if drawing is not None and name != "reset" and drawing.table is self._sent:
            drawing = None
        with NamedFailures(name):
            answers = self._env.call("ask", name, arguments, drawing)
        if self._parameters is not None:
            self._sent, self._parameters.now = self._parameters.table, [drawn for *_, drawn in answers]
        self._positions = [position for _, position, _ in answers]
        return [answer for answer, *_ in answers]

    def reset(self, seeds: Sequence[int], past: RunningEpisodes | None = None) -> dict[str, tuple[Columns, Array]]:
        began: dict[str, tuple[Columns, Array]] = _joined(self._ask("reset", list(seeds), past))
        return began

    @property
    def position(self) -> Position:
        episodes, lengths, returns, _ = zip(*self._positions, strict=True)
        return Position(sum(episodes, ()), sum(lengths, ()), np.concatenate(returns))

    def step(self, actions: Mapping[str, Columns]) -> Step:
        parts = self._ask("step", actions)
        policies = {policy_id: _joined_steps([part.policies[policy_id] for part in parts]) for policy_id in actions}
        return Step(policies, [(index, record) for index, part in enumerate(parts) for _, record in part.episodes])

    def set_phase(self, phase: Phase) -> None:
        self._ask("set_phase", phase)

    def set_paused(self, paused: bool) -> bool:
        return any(self._ask("set_paused", paused))

    def close(self) -> None:
        close_vector(self._env)


def _joined_steps(parts: Sequence[PolicyStep]) -> PolicyStep:
    acted = [(its.obs, its.reward, its.terminated, its.truncated, its.mask, its.info, its.acts) for its in parts]
    obs, reward, terminated, truncated, mask, info, acts = _joined(acted)
    finals = {name: np.concatenate([its.final_obs[name] for its in parts]) for name in parts[0].final_obs}
    slots = np.concatenate([its.final_slots * len(parts) + index for index, its in enumerate(parts)])
    return PolicyStep(obs, reward, terminated, truncated, mask, finals, slots, info, acts, parts[0].in_turns)


def _joined(parts: Sequence[Any]) -> Any:
    """Joins arrays `[A, …]` of each of N environments to `[A × N, …]`, also within mappings and tuples."""
    if isinstance(parts[0], dict):
        return {name: _joined([its[name] for its in parts]) for name in parts[0]}
    if isinstance(parts[0], tuple):
        return tuple(_joined(its) for its in zip(*parts, strict=True))
    stacked = np.stack(parts, axis=1)
    return stacked.reshape(-1, *stacked.shape[2:])
