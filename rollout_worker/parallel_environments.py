"""PettingZoo parallel environments: N copies, stepped one after another, their agents sorted into policies."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollout_worker.making import failure, make
from rollout_worker.trail import Past, episode_seed
from rollout_worker.vector import SUCCESS, Place, PolicyStep, Step, episode_record, numbers, pick
from shared.config import EnvironmentConfig
from shared.errors import EnvironmentFailure
from shared.fragment import EpisodeRecord
from shared.spaces import Array, Columns, EnvironmentDescription

_LOGGER = logging.getLogger("stagecoach.worker")


class ParallelEnvironments:
    """PettingZoo parallel environments. Slot = agent's number within its policy × N + environment."""

    def __init__(self, config: EnvironmentConfig, description: EnvironmentDescription) -> None:
        self.num_envs = config.num_envs
        self._most_steps = config.max_episode_steps or sys.maxsize
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
        except (Exception, SystemExit) as error:
            raise failure(index, "reset", error) from None
        self._observations[index] = dict(observations)
        self._live[index] = set(self._envs[index].agents)
        self._over[index] = set()
        self._returns[index] = dict.fromkeys(self._description.agents, 0.0)
        self._lengths[index] = 0
        self._infos[index] = {}

    def step(self, actions: Mapping[str, Columns]) -> Step:
        try:
            return self._step(actions)
        except EnvironmentFailure:
            raise
        except Exception as error:  # what it returned fits in no column
            raise failure(None, "step", error) from None

    def _step(self, actions: Mapping[str, Columns]) -> Step:
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
        except (Exception, SystemExit) as error:
            raise failure(index, "step", error) from None
        self._lengths[index] += 1
        if self._lengths[index] >= self._most_steps:
            truncated = {agent: bool(truncated.get(agent)) or not terminated.get(agent) for agent in acting}
        for agent, (policy_id, slot) in acting.items():
            step = steps[policy_id]
            step.mask[slot] = True
            step.reward[slot] = rewards.get(agent, 0.0)
            step.terminated[slot] = terminated.get(agent, False)
            step.truncated[slot] = truncated.get(agent, False)
            self._returns[index][agent] += float(rewards.get(agent, 0.0))
            if step.truncated[slot] and agent not in observations:
                raise failure(index, "step", KeyError(f"no last observation of {agent}"))
            if (step.terminated[slot] or step.truncated[slot]) and agent in observations:
                # copied at once: the environment may use its array again
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
            for name, value in numbers(info).items():
                if name in SUCCESS:
                    successes.append(bool(value))
                else:
                    metrics[f"{agent}.{name}"] = value
        if successes:
            metrics[SUCCESS[0]] = float(all(successes))
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
            try:
                env.close()
            except Exception as error:
                _LOGGER.warning("closing an environment failed: %s: %s", type(error).__name__, error)
