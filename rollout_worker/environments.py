"""Vectorised environments with one face: N copies, stepped together, their agents sorted into policies.

Every step tells apart `terminated` and `truncated`, hands over the true last observation of truncated slots, and has
already reset what ended. `mask` is false where there was nothing to act for (an absent agent; the extra step in which
a native vector environment resets itself).
"""

from __future__ import annotations

import copy
import logging
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from rollout_worker.making import PAST, RETURN, Guarded, failure, make, make_native
from rollout_worker.trail import Past, episode_seed
from shared.child import end_with_parent
from shared.config import EnvironmentConfig
from shared.errors import EnvironmentFailure
from shared.fragment import EpisodeRecord
from shared.spaces import Array, Columns, EnvironmentDescription

_LOGGER = logging.getLogger("stagecoach.worker")


_SUCCESS = ("is_success", "success")
"""How environments name the success of an episode in `info`."""


@dataclass
class PolicyStep:
    """One step of all slots of one policy id."""

    obs: Columns
    """`[S, …]`: what to act on next."""
    reward: Array
    terminated: Array
    truncated: Array
    mask: Array
    final_obs: Columns
    """`[M, …]`: the true last observation of each truncated slot."""
    final_slots: Array
    """`[M]`, int32."""


@dataclass
class Step:
    """One step of all environments."""

    policies: dict[str, PolicyStep]
    episodes: list[tuple[int, EpisodeRecord]] = field(default_factory=list)
    """Environment number and record of each episode that ended."""


class Place(NamedTuple):
    """Where the environments stand."""

    episodes: tuple[int, ...]
    """Numbers of their running episodes."""
    lengths: tuple[int, ...]
    """Steps in them so far."""
    returns: Array
    """Float64; the sum of rewards so far, per environment (and agent)."""


class VectorEnvironment(Protocol):
    """What the sampler steps."""

    num_envs: int

    def reset(self, seeds: Sequence[int], past: Past | None = None) -> dict[str, tuple[Columns, Array]]:
        """Starts all environments; per policy id the first observations and the mask.

        The seeds are those of the first episodes, later ones follow from them (`trail.episode_seed`). With `past` each
        environment takes up its episode, by doing its actions again.
        """
        ...

    @property
    def place(self) -> Place | None:
        """Where the environments stand; None where they cannot be brought there again (native ones)."""
        ...

    def step(self, actions: Mapping[str, Columns]) -> Step:
        """Takes the actions of all slots, per policy id; raises `EnvironmentFailure`."""
        ...

    def close(self) -> None:
        """Ends the environments."""
        ...


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

    def reset(self, seeds: Sequence[int], past: Past | None = None) -> dict[str, tuple[Columns, Array]]:
        self._seeds = seeds
        self._episodes[:] = past.episodes if past else 0
        self._lengths[:] = past.lengths if past else 0
        try:
            if self._native:  # one source of randomness for all copies: it takes one seed
                observations, infos = self._env.reset(seed=seeds[0])
            else:
                options = {PAST: self._actions_done(past)} if past else None
                observations, infos = self._env.reset(seed=self._episode_seeds(np.ones(self.num_envs)), options=options)
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

    def _episode_seeds(self, which: Array) -> Any:
        """A seed for each of `which`, None for the others."""
        seeds: list[int | None] = [None] * self.num_envs
        for index in np.flatnonzero(which).tolist():
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
        mask = ~self._over if self._mode is AutoresetMode.NEXT_STEP else np.ones(self.num_envs, np.bool_)
        done = (terminated | truncated) & mask
        reward = np.where(mask, rewards, 0.0)
        self._returns += reward
        self._lengths += mask
        final_slots = np.flatnonzero(truncated & mask).astype(np.int32)
        episodes = [(int(i), self._record(int(i), infos)) for i in np.flatnonzero(done)]
        final = self._final_obs(observations, infos, final_slots)
        if done.any():
            self._returns[done] = 0
            self._lengths[done] = 0
            self._episodes[done] += 1
            if self._mode is AutoresetMode.DISABLED:
                seeds = None if self._native else self._episode_seeds(done)
                observations, _ = self._env.reset(seed=seeds, options={"reset_mask": done})
        self._over = done
        step = PolicyStep(
            self._spaces.observation.flatten("obs", observations),
            reward.astype(np.float32), terminated & mask, truncated & mask, mask, final, final_slots,
        )  # fmt: skip
        return Step({self._policy: step}, episodes)

    def _final_obs(self, observations: Any, infos: dict[str, Any], slots: Array) -> Columns:
        if self._mode is AutoresetMode.SAME_STEP and slots.size:
            rows = [self._spaces.observation.flatten("final_obs", infos["final_obs"][i]) for i in slots]
            return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        return {
            name: array[slots] for name, array in self._spaces.observation.flatten("final_obs", observations).items()
        }

    def _record(self, index: int, infos: dict[str, Any]) -> EpisodeRecord:
        if self._mode is AutoresetMode.SAME_STEP:
            infos = infos.get("final_info", {})
        metrics: dict[str, float] = {}
        for name, values in infos.items():
            present = infos.get(f"_{name}")
            if present is not None and np.ndim(values) == 1 and present[index]:
                metrics |= scalar(name, values[index])
        return episode_record(float(self._returns[index]), int(self._lengths[index]), metrics)

    def close(self) -> None:
        try:
            self._env.close()
        except Exception as error:  # such as a process of theirs that has died: nobody is there to say good-bye to
            _LOGGER.warning("closing the environments failed: %s: %s", type(error).__name__, error)
            for process in getattr(self._env, "processes", ()):
                process.kill()
                process.join()
            self._env.closed = True


class ParallelEnvironments:
    """PettingZoo parallel environments. Slot = agent's number within its policy × N + environment."""

    def __init__(self, config: EnvironmentConfig, description: EnvironmentDescription) -> None:
        self.num_envs = config.num_envs
        self._description = description
        self._envs = [make(config) for _ in range(self.num_envs)]
        self._slots: dict[str, list[str]] = {policy_id: [] for policy_id in description.policies}
        for agent, policy_id in description.agents.items():
            self._slots[policy_id].append(agent)
        self._live: list[set[str]] = [set() for _ in range(self.num_envs)]
        self._over: list[set[str]] = [set() for _ in range(self.num_envs)]
        """Agents that have ended in the present episode, whether the environment still lists them or not."""
        self._observations: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        self._returns: list[dict[str, float]] = [{} for _ in range(self.num_envs)]
        self._lengths = [0] * self.num_envs
        self._infos: list[dict[str, dict[str, Any]]] = [{} for _ in range(self.num_envs)]
        self._seeds: Sequence[int] = ()
        self._episodes = [0] * self.num_envs

    def reset(self, seeds: Sequence[int], past: Past | None = None) -> dict[str, tuple[Columns, Array]]:
        self._seeds = seeds
        for index in range(self.num_envs):
            self._reset(index, past.episodes[index] if past else 0)
            if past is not None:
                self._do_again(index, past)
        return {policy_id: self._stacked(policy_id) for policy_id in self._slots}

    @property
    def place(self) -> Place | None:
        returns = np.array([[line[agent] for agent in self._description.agents] for line in self._returns])
        return Place(tuple(self._episodes), tuple(self._lengths), returns)

    def _do_again(self, index: int, past: Past) -> None:
        _, first, last = past.of(index)
        steps = {policy_id: self._blank(policy_id) for policy_id in self._slots}
        finals: dict[str, list[tuple[int, Any]]] = {policy_id: [] for policy_id in self._slots}
        for row in range(first, last):
            if not self._live[index]:
                return  # it is not the episode that it was: whoever compares will see
            columns = {
                policy: {name: array[row] for name, array in part.items()} for policy, part in past.actions.items()
            }
            self._step_one(index, self._nested(columns), steps, finals)

    def _nested(self, actions: Mapping[str, Columns]) -> dict[str, Any]:
        policies = self._description.policies
        return {policy_id: policies[policy_id].action.to_environment(columns) for policy_id, columns in actions.items()}

    def _reset(self, index: int, episode: int) -> None:
        self._episodes[index] = episode
        try:
            observations, _ = self._envs[index].reset(seed=episode_seed(self._seeds[index], episode))
        except Exception as error:
            raise failure(index, "reset", error) from None
        self._observations[index] = dict(observations)
        self._live[index] = set(self._envs[index].agents)
        self._over[index] = set()
        self._returns[index] = dict.fromkeys(self._description.agents, 0.0)
        self._lengths[index] = 0
        self._infos[index] = {}

    def step(self, actions: Mapping[str, Columns]) -> Step:
        steps = {policy_id: self._blank(policy_id) for policy_id in self._slots}
        finals: dict[str, list[tuple[int, Any]]] = {policy_id: [] for policy_id in self._slots}
        episodes = []
        nested = self._nested(actions)
        for index in range(self.num_envs):
            self._step_one(index, nested, steps, finals)
            if not self._live[index]:
                episodes.append((index, self._record(index)))
                self._reset(index, self._episodes[index] + 1)
        for policy_id, step in steps.items():
            step.obs = self._stacked(policy_id)[0]
            step.final_slots = np.array([slot for slot, _ in finals[policy_id]], np.int32)
            step.final_obs = self._rows(policy_id, "final_obs", [value for _, value in finals[policy_id]])
        return Step(steps, episodes)

    def _step_one(
        self,
        index: int,
        nested: Mapping[str, Any],
        steps: dict[str, PolicyStep],
        finals: dict[str, list[tuple[int, Any]]],
    ) -> None:
        acting = {}
        for policy_id, agents in self._slots.items():
            for number, agent in enumerate(agents):
                if agent in self._live[index]:
                    acting[agent] = (policy_id, number * self.num_envs + index)
        try:
            observations, rewards, terminated, truncated, infos = self._envs[index].step(
                {agent: pick(nested[policy_id], slot) for agent, (policy_id, slot) in acting.items()}
            )
        except Exception as error:
            raise failure(index, "step", error) from None
        self._lengths[index] += 1
        for agent, (policy_id, slot) in acting.items():
            step = steps[policy_id]
            step.mask[slot] = True
            step.reward[slot] = rewards.get(agent, 0.0)
            step.terminated[slot] = terminated.get(agent, False)
            step.truncated[slot] = truncated.get(agent, False)
            self._returns[index][agent] += float(rewards.get(agent, 0.0))
            if step.truncated[slot] and agent not in observations:
                raise failure(index, "step", KeyError(f"no last observation of {agent}"))
            if step.truncated[slot]:  # copied at once: the environment may use its array again
                finals[policy_id].append((slot, copy.deepcopy(observations[agent])))
            self._infos[index][agent] = dict(infos.get(agent, {}))
        self._observations[index] = dict(observations)
        self._over[index] |= {agent for agent in acting if terminated.get(agent) or truncated.get(agent)}
        self._live[index] = set(self._envs[index].agents) - self._over[index]

    def _record(self, index: int) -> EpisodeRecord:
        """Returns summed over the agents; an agent's numbers as `agent.name`; success where no agent failed."""
        metrics: dict[str, float] = {}
        successes = []
        for agent, info in self._infos[index].items():
            for name, value in info.items():
                if name in _SUCCESS:
                    successes.append(bool(value))
                else:
                    metrics |= scalar(f"{agent}.{name}", value)
        if successes:
            metrics[_SUCCESS[0]] = float(all(successes))
        returns = self._returns[index]
        return episode_record(sum(returns.values()), self._lengths[index], metrics, returns)

    def _stacked(self, policy_id: str) -> tuple[Columns, Array]:
        agents = self._slots[policy_id]
        order = [(agent, index) for agent in agents for index in range(self.num_envs)]
        mask = np.array([agent in self._live[index] for agent, index in order])
        rows = [self._observations[index].get(agent) if agent in self._live[index] else None for agent, index in order]
        return self._rows(policy_id, "obs", rows), mask

    def _rows(self, policy_id: str, prefix: str, values: Sequence[Any]) -> Columns:
        """Stacked columns; zeros where an agent is absent (None)."""
        spec = self._description.policies[policy_id].observation
        columns = {leaf.column(prefix): np.zeros((len(values), *leaf.shape), leaf.column_dtype) for leaf in spec.leaves}
        for row, value in enumerate(values):
            if value is not None:
                for name, array in spec.flatten(prefix, value).items():
                    columns[name][row] = array
        return columns

    def _blank(self, policy_id: str) -> PolicyStep:
        size = len(self._slots[policy_id]) * self.num_envs
        over, cut, mask = (np.zeros(size, np.bool_) for _ in range(3))
        return PolicyStep({}, np.zeros(size, np.float32), over, cut, mask, {}, np.zeros(0, np.int32))

    def close(self) -> None:
        for env in self._envs:
            env.close()


def episode_record(
    episode_return: float, length: int, metrics: dict[str, float], agent_returns: dict[str, float] | None = None
) -> EpisodeRecord:
    """A record, with `is_success` or `success` taken out of the metrics."""
    found = [metrics.pop(name) for name in _SUCCESS if name in metrics]
    success = found[0] if found else None
    return EpisodeRecord(
        episode_return, length, None if success is None else bool(success), agent_returns or {}, metrics
    )


def scalar(name: str, value: Any) -> dict[str, float]:
    """`{name: float}` for a finite number, else nothing."""
    if isinstance(value, bool | int | float | np.bool_ | np.number) and np.isfinite(float(value)):
        return {name: float(value)}
    return {}


def pick(nested: Any, index: int) -> Any:
    """One environment's action out of a nested batch."""
    if isinstance(nested, dict):
        return {key: pick(value, index) for key, value in nested.items()}
    if isinstance(nested, tuple):
        return tuple(pick(value, index) for value in nested)
    return nested[index]


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
    """An environment that hangs does not see that its worker is gone; the kernel shall end it."""
    end_with_parent(signal.SIGKILL)()
    return _guarded(config, index)
