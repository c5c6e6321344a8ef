"""PettingZoo environments: N copies, stepped one after another, their agents grouped by policy.

Agents may join, leave and rejoin at any step of an episode. If agents act in turns (PettingZoo's AEC), a step is one
agent's turn, whose outcome is known at that agent's next turn: see `Turns`.
"""

import copy
import logging
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from gymnasium import spaces

from stagecoach.rollout_worker.environments import vector_env
from stagecoach.rollout_worker.environments.action_masks import KEY, from_info
from stagecoach.rollout_worker.environments.parameters import EpisodeParameters, Parameterized
from stagecoach.rollout_worker.environments.seeding import episode_seed
from stagecoach.rollout_worker.environments.vector_env import (
    NamedFailures,
    PolicyStep,
    Position,
    RunningEpisodes,
    Step,
    pick,
)
from stagecoach.shared.base.errors import EnvironmentFailure
from stagecoach.shared.config.environments.environment import EnvironmentConfig
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.experience.fragment import INFO, EpisodeRecord
from stagecoach.shared.experience.spaces import Array, Columns, EnvironmentDescription

_LOGGER = logging.getLogger("stagecoach.worker")
_Made: TypeAlias = tuple[PolicyStep, list[tuple[int, Any]]]
"""A policy's step, with slots and last observations of the episodes that end in it."""


@dataclass
class Episode:
    number: int
    observations: dict[str, Any]
    live: set[str]
    returns: dict[str, float]
    over: set[str] = field(default_factory=set)
    """Agents that have ended and are still in the environment's `agents`."""
    first_over: bool = False
    waiting: set[str] = field(default_factory=set)
    """Agents that have acted and had no turn since (in turns)."""
    present: set[str] = field(default_factory=set)
    """Agents after the last turn that have not seen their end (in turns)."""
    infos: dict[str, dict[str, Any]] = field(default_factory=dict)
    sums: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))
    """Agent → name → sum of its numbers in `info`."""
    length: int = 0

    def record(self) -> EpisodeRecord:
        """Returns the record: returns summed over the agents, numbers as `agent.name`, success if no agent failed."""
        metrics: dict[str, float] = {}
        successes = []
        for agent, info in self.infos.items():
            for name, value in vector_env.numbers(info).items():
                if name in vector_env.SUCCESS:
                    successes.append(bool(value))
                else:
                    metrics[f"{agent}.{name}"] = value
        for agent, sums in self.sums.items():
            metrics |= {f"{agent}.{name}_sum": total for name, total in sums.items()}
        if successes:
            metrics[vector_env.SUCCESS[0]] = float(all(successes))
        return vector_env.episode_record(sum(self.returns.values()), self.length, metrics, self.returns)


class Parallel:
    """Copies whose agents act at the same time. Slot = number of the agent within its policy × N + environment."""

    def __init__(
        self, envs: Sequence[Any], config: EnvironmentConfig, description: EnvironmentDescription,
        parameters: EpisodeParameters | None, parameterized: Sequence[Parameterized], first: int = 0,
    ) -> None:  # fmt: skip
        """Owns `envs`. `parameterized` applies `parameters` to each; `first` is the first number in messages."""
        self._envs, self.num_envs, self._first = list(envs), len(envs), first
        self._parameters, self._parameterized = parameters, parameterized
        limit = None if config.hierarchy else config.max_episode_steps  # a hierarchy limits its Gymnasium environment
        self._most_steps = limit or sys.maxsize
        self._first_ends = config.episode_ends == "any"
        self._description = description
        self._agents = {
            policy_id: [agent for agent, its in description.agents.items() if its == policy_id]
            for policy_id in description.policies
        }
        self._places = {
            agent: (policy_id, number * self.num_envs)
            for policy_id, agents in self._agents.items()
            for number, agent in enumerate(agents)
        }
        """Agent → policy, and slot there in the first environment."""
        choices = {agent: description.policies[its].action.choices for agent, its in description.agents.items()}
        self._masks = choices if config.action_mask == "info" and config.api == "pettingzoo" else {}
        """Agent → size of its mask, if masks are in `info`."""
        seen = {agent: description.policies[its].observation for agent, its in description.agents.items()}
        self._states = [agent for agent, spec in seen.items() if spec.own != spec]
        """Agents whose critics observe the environment's state."""
        self._absent = {agent: spec.own.nest("obs", spec.zeros("obs")) for agent, spec in seen.items()}
        self._seeds: Sequence[int] = ()
        self._episodes: list[Episode] = []

    def reset(self, seeds: Sequence[int], past: RunningEpisodes | None = None) -> dict[str, tuple[Columns, Array]]:
        self._seeds, self._episodes = seeds, []
        for index in range(self.num_envs):
            self._episodes.append(self._begin(index, past.episodes[index] if past else 0, drawn=past is None))
            for actions in past.done(index) if past else ():
                if not self._episodes[index].live:
                    break  # another episode than before: the successor compares digests and detects it
                with NamedFailures("step", self._first + index):
                    self._step_one(index, self._nested(actions), self._blank())
        with NamedFailures("reset"):  # such as an observation that fits no column
            return {policy_id: self._stacked(policy_id) for policy_id in self._agents}

    @property
    def position(self) -> Position:
        numbers, lengths = (tuple(getattr(its, name) for its in self._episodes) for name in ("number", "length"))
        returns = np.array([[its.returns[agent] for agent in self._description.agents] for its in self._episodes])
        return Position(numbers, lengths, returns)

    def _begin(self, index: int, number: int, drawn: bool = True) -> Episode:
        returns = dict.fromkeys(self._description.agents, 0.0)
        seed = episode_seed(self._seeds[index], number)
        options: dict[str, Any] = {}
        with NamedFailures("reset", self._first + index):
            if self._parameters is not None:
                if drawn:
                    self._parameters.begin(index, number, seed)
                values = self._parameters.now[index].values
                self._envs[index], options = self._parameterized[index].prepare(self._envs[index], values)
            asked = {"seed": seed, "options": options} if options else {"seed": seed}
            episode = self._reset_one(index, Episode(number, {}, set(), returns), asked)
            if not episode.live:
                raise ValueError("no agent can act; expected at least one in agents after reset()")
            return episode

    def _reset_one(self, index: int, episode: Episode, asked: Mapping[str, Any]) -> Episode:
        observations, infos = self._envs[index].reset(**asked)
        episode.live = set(self._envs[index].agents)
        episode.observations = self._seen(self._envs[index], observations, infos, episode.live, set())
        return episode

    def _seen(
        self, env: Any, observed: Mapping[str, Any], infos: Mapping[str, Any], live: Set[str], cut: Set[str]
    ) -> dict[str, Any]:
        """Returns the observations with masks from `infos` and the state for critics."""
        self._all_observe(live, observed)
        seen = dict(observed)
        if self._masks:
            seen = {agent: self._with_mask(agent, its, infos.get(agent, {}), live) for agent, its in observed.items()}
        return with_state(env, seen, self._absent, self._states, live, cut) if self._states else seen

    def _all_observe(self, live: Set[str], observations: Mapping[str, Any]) -> None:
        """Raises `KeyError` if an agent that acts next has no observation, or is unknown."""
        if strange := sorted(live - self._places.keys()):
            raise KeyError(f"agents has {', '.join(strange)}; expected only names in possible_agents")
        if missing := sorted(agent for agent in live if observations.get(agent) is None):
            raise KeyError(f"no observation of {', '.join(missing)}")

    def _with_mask(self, agent: str, observation: Any, info: Mapping[str, Any], live: Set[str]) -> Any:
        choices = self._masks.get(agent, 0)
        if not choices:
            return observation
        none = {} if agent in live else {KEY: np.zeros(choices, np.int8)}  # it does not act, so it need not have one
        return from_info(observation, {**none, **_checked_info(agent, info)}, choices)

    @NamedFailures("step")  # such as an observation that fits no column
    def step(self, actions: Mapping[str, Columns]) -> Step:
        nested, made, episodes = self._nested(actions), self._blank(), []
        for index in range(self.num_envs):
            with NamedFailures("step", self._first + index):
                self._step_one(index, nested, made)
            if not self._episodes[index].live:
                episodes.append((index, self._record(index, self._episodes[index])))
                self._episodes[index] = self._begin(index, self._episodes[index].number + 1)
        for policy_id, (step, finals) in made.items():
            step.obs, step.acts = self._stacked(policy_id)
            step.final_slots = np.array([slot for slot, _ in finals], np.int32)
            step.final_obs = self._rows(policy_id, "final_obs", [value for _, value in finals])
        return Step({policy_id: step for policy_id, (step, _) in made.items()}, episodes)

    def _record(self, index: int, episode: Episode) -> EpisodeRecord:
        record = episode.record()
        if not math.isfinite(record.episode_return):  # a part of it may be in no transition
            raise EnvironmentFailure(
                f"the environment returned rewards that cannot be learned from: in an episode they add up to "
                f"{record.agent_returns}; look for a division by zero"
            )
        return record if self._parameters is None else self._parameters.judged(index, record)

    def _step_one(self, index: int, actions: Mapping[str, Any], made: Mapping[str, _Made]) -> None:
        env, episode = self._envs[index], self._episodes[index]
        acting = {agent: self._places[agent] for agent in self._places if agent in episode.live}
        observed, rewards, terminated, truncated, infos = env.step(
            {agent: pick(actions[policy_id], first + index) for agent, (policy_id, first) in acting.items()}
        )
        ended = {agent for agent in acting if terminated.get(agent) or truncated.get(agent)}
        there, last = set(env.agents), {agent for agent in ended if not terminated.get(agent)}
        observations = self._seen(env, observed, infos, there - ended - episode.over, last)
        episode.length += 1
        cut = episode.length >= self._most_steps or (self._first_ends and bool(ended or acting.keys() - there))
        for agent in acting:
            truncation = bool(truncated.get(agent))
            died = bool(terminated.get(agent)) or (agent not in there and not truncation)  # also if it just left
            truncation |= cut and not died
            if agent not in rewards and (agent in there or agent in ended):
                raise KeyError(f"no reward for {agent}; expected one for each agent that acted")
            brought = float(rewards.get(agent, 0.0)), died, truncation, observations.get(agent)
            self._acted(index, agent, brought, infos.get(agent, {}), made)
            if died or truncation:
                episode.over.add(agent)
        for agent in (its for its in self._places if its not in acting):  # agents that ended before, or join now
            episode.returns[agent] += float(rewards.get(agent, 0.0))
            if infos.get(agent):
                episode.infos[agent] = {**episode.infos.get(agent, {}), **_checked_info(agent, infos[agent])}
        episode.observations = observations
        episode.over &= there  # an agent that has left may rejoin
        episode.live = set() if cut else there - episode.over

    def _acted(
        self, index: int, agent: str, brought: tuple[float, bool, bool, Any], info: Mapping[str, Any],
        made: Mapping[str, _Made],
    ) -> None:  # fmt: skip
        """Records a transition of `agent`: `brought` is its reward, both flags and the next observation."""
        (reward, terminated, truncated, observation), episode = brought, self._episodes[index]
        policy_id, first = self._places[agent]
        (step, finals), slot = made[policy_id], first + index
        step.mask[slot], step.reward[slot] = True, reward
        step.terminated[slot], step.truncated[slot] = terminated, truncated
        episode.returns[agent] += reward
        episode.first_over |= terminated or truncated
        if truncated and observation is None:
            raise KeyError(f"no last observation of {agent}")
        if (terminated or truncated) and observation is not None:
            finals.append((slot, copy.deepcopy(observation)))  # the environment may reuse its array
        episode.infos[agent] = _checked_info(agent, info)
        if not (names := self._description.info_columns):
            return
        for name, number in zip(names, vector_env.info_numbers(info, names).tolist(), strict=True):
            step.info[INFO + name][slot] = number
            episode.sums[agent][name] += 0.0 if math.isnan(number) else number

    def _nested(self, actions: Mapping[str, Columns]) -> dict[str, Any]:
        policies = self._description.policies
        return {policy_id: policies[policy_id].action.to_environment(columns) for policy_id, columns in actions.items()}

    def _stacked(self, policy_id: str) -> tuple[Columns, Array]:
        places = [(agent, episode) for agent in self._agents[policy_id] for episode in self._episodes]
        present = np.array([agent in its.live for agent, its in places], np.bool_)
        rows = [
            its.observations.get(agent) if here else None for (agent, its), here in zip(places, present, strict=True)
        ]
        return self._rows(policy_id, "obs", rows), present

    def _rows(self, policy_id: str, prefix: str, values: Sequence[Any]) -> Columns:
        spec = self._description.policies[policy_id].observation
        columns = spec.zeros(prefix, len(values))
        for row, value in enumerate(values):
            if value is not None:
                for name, array in spec.flatten(prefix, value).items():
                    if array.shape != (expected := columns[name].shape[1:]):  # NumPy would broadcast a single number
                        raise ValueError(
                            f"{name.replace(prefix, 'an observation', 1)} of policy {policy_id} has the shape "
                            f"{array.shape}; expected {expected}"
                        )
                    columns[name][row] = array
        return columns

    def _blank(self) -> dict[str, _Made]:
        made: dict[str, _Made] = {}
        for policy_id, agents in self._agents.items():
            size = len(agents) * self.num_envs
            over, cut, mask = (np.zeros(size, np.bool_) for _ in range(3))
            info = {INFO + name: np.full(size, np.nan, np.float32) for name in self._description.info_columns}
            reward, no_slots = np.zeros(size, np.float32), np.zeros(0, np.int32)
            in_turns = self._description.in_turns
            made[policy_id] = PolicyStep({}, reward, over, cut, mask, {}, no_slots, info, in_turns=in_turns), []
        return made

    @NamedFailures("set_phase")
    def set_phase(self, phase: Phase) -> None:
        self._call_each("set_phase", str(phase))

    @NamedFailures("set_paused")
    def set_paused(self, paused: bool) -> bool:
        return self._call_each("set_paused", paused)

    def _call_each(self, name: str, value: Any) -> bool:
        pairs = zip(self._parameterized, self._envs, strict=True)
        return sum(each.call_layers(env, name, value) for each, env in pairs) > 0

    def close(self) -> None:
        for env in self._envs:
            try:
                env.close()
            except Exception as error:
                _LOGGER.warning("closing an environment failed: %s: %s", type(error).__name__, error)


class Turns(Parallel):
    """Copies whose agents act one after another. An agent's turn is a transition; its reward is the sum of the agent's
    rewards up to its next turn. `acts` marks the agent that acts next."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._games: dict[int, tuple[Any, Any]] = {}
        """Number → environment, and its layer that holds the state: reading it through wrappers is slow."""

    def _reset_one(self, index: int, episode: Episode, asked: Mapping[str, Any]) -> Episode:
        env = self._envs[index]
        env.reset(**asked)
        if index not in self._games or self._games[index][0] is not env:
            self._games[index] = env, vector_env.holder(env, _STATE) or env
        self._next_turn(index, episode, self._blank())
        return episode

    def _step_one(self, index: int, actions: Mapping[str, Any], made: Mapping[str, _Made]) -> None:
        env, episode = self._envs[index], self._episodes[index]
        (agent,) = episode.live
        policy_id, first = self._places[agent]
        if agent in (paid := getattr(self._games[index][1], "_cumulative_rewards", {})):
            paid[agent] = 0.0  # the agent has got it; parallel_to_aec clears it only at the end of a cycle
        env.step(pick(actions[policy_id], first + index))
        episode.length += 1
        episode.waiting.add(agent)
        self._next_turn(index, episode, made)
        if episode.live and (episode.length >= self._most_steps or (self._first_ends and episode.first_over)):
            self._cut(index, episode, made)

    def _next_turn(self, index: int, episode: Episode, made: Mapping[str, _Made]) -> None:
        """Advances to the next agent that acts, past agents that have ended; to none if the game is over."""
        env = self._envs[index]
        episode.live, episode.observations = set(), {}
        while True:
            game = self._games[index][1]
            if dropped := episode.present.difference(game.agents):
                self._dropped(index, episode, dropped, made)
                episode.waiting -= dropped
            episode.present = set(game.agents)
            if not game.agents:
                return
            agent = game.agent_selection
            observation, reward, terminated, truncated, info = _last(env, game, agent)
            live = set() if terminated or truncated else {agent}
            self._all_observe(live, {agent: observation})
            observation = self._with_mask(agent, observation, info, live)
            if agent in episode.waiting:
                episode.waiting.discard(agent)
                self._acted(index, agent, (float(reward), bool(terminated), bool(truncated), observation), info, made)
            else:
                _without_turn(episode, agent, reward, bool(terminated or truncated), info)
            if not (terminated or truncated):
                episode.live, episode.observations = {agent}, {agent: observation}
                return
            episode.present.discard(agent)
            env.step(None)

    def _dropped(self, index: int, episode: Episode, agents: Set[str], made: Mapping[str, _Made]) -> None:
        """Records the last turns of agents that the game dropped without a further turn. They have terminated, unless
        the game says that they are only truncated."""
        game = self._games[index][1]
        for agent in sorted(agents):
            reward, info = float(game._cumulative_rewards.get(agent, 0.0)), game.infos.get(agent, {})
            if agent not in episode.waiting:
                _without_turn(episode, agent, reward, True, info)
                continue
            cut = bool(game.truncations.get(agent)) and not game.terminations.get(agent)
            seen = self._with_mask(agent, self._envs[index].observe(agent), info, set()) if cut else None
            self._acted(index, agent, (reward, not cut, cut, seen), info, made)

    def _cut(self, index: int, episode: Episode, made: Mapping[str, _Made]) -> None:
        """Truncates the last turn of each agent, to end the game early."""
        env, game = self._envs[index], self._games[index][1]
        seen_now = copy.deepcopy(episode.observations)  # the environment may reuse its array for another agent
        for agent in [agent for agent in self._places if agent in game.agents]:
            policy_id, first = self._places[agent]
            (step, finals), slot = made[policy_id], first + index
            if agent in episode.waiting:
                reward, info = float(game._cumulative_rewards.get(agent, 0.0)), game.infos.get(agent, {})
                seen = self._with_mask(agent, env.observe(agent), info, set())
                died = bool(game.terminations.get(agent))  # and has not seen it yet
                self._acted(index, agent, (reward, died, not died, seen), info, made)
            elif step.mask[slot] and agent in episode.live:  # the outcome of this very turn is known
                step.truncated[slot] = True
                finals.append((slot, seen_now[agent]))
            elif agent not in episode.live:
                _without_turn(episode, agent, game._cumulative_rewards.get(agent, 0.0), False, {})
        episode.live = set()


_STATE = {"agents", "agent_selection", "rewards", "_cumulative_rewards", "terminations", "truncations", "infos"}


def _checked_info(agent: str, info: Any) -> dict[str, Any]:
    if not isinstance(info, Mapping):
        raise TypeError(f"the info of {agent} is {info!r:.60}; expected a dict, such as {{}}")
    return dict(info)


def _without_turn(episode: Episode, agent: str, reward: Any, ended: bool, info: Any) -> None:
    """Records the reward, and the info at the end, of an agent before its first turn: they are in no transition."""
    episode.returns[agent] += float(reward)
    episode.first_over |= ended
    if ended:
        episode.infos[agent] = _checked_info(agent, info)


def _last(env: Any, game: Any, agent: str) -> Any:
    if type(env).last.__module__ != "pettingzoo.utils.env":  # overridden
        return env.last()
    told = game._cumulative_rewards, game.terminations, game.truncations, game.infos
    return env.observe(agent), *(each[agent] for each in told)


def _has_state(env: Any) -> bool:
    return isinstance(getattr(env, "state_space", None), spaces.Space)


def state_space(env: Any, observed: Mapping[str, spaces.Space[Any]]) -> spaces.Dict:
    """Returns the space of the state; `observed` are the spaces of the agents' observations."""
    seen = env.state_space if _has_state(env) else spaces.Dict(dict(observed))
    return spaces.Dict({"agent": spaces.Discrete(len(observed)), "seen": seen})


def with_state(
    env: Any, observations: Mapping[str, Any], absent: Mapping[str, Any], who: Iterable[str], live: Set[str],
    cut: Set[str],
) -> Any:  # fmt: skip
    """Returns the observations of all present agents, for the agents `who` as pairs of their own and the state:
    `state()`, else the observations of the `live` agents, which act next, and at a last observation of agents that this
    step `cut`. Others count as in `absent`."""
    present = {agent: observation for agent, observation in observations.items() if observation is not None}
    now: Any
    last: Any
    if _has_state(env):  # PettingZoo's `state()`
        now = last = env.state()
    else:
        now = {agent: present[agent] if agent in live else absent[agent] for agent in absent}
        last = now | {agent: present[agent] for agent in cut & present.keys()}
    states = {
        agent: {"agent": number, "seen": now if agent in live else last}
        for number, agent in enumerate(absent)
        if agent in present
    }
    return {**observations, **{agent: (observations[agent], states[agent]) for agent in who if agent in states}}
