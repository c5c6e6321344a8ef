"""One agent's Gymnasium environment as a game in turns (`environment.hierarchy`): of levels, or of options.

`Levels`: an action of an upper level is a goal for the level below, which observes it from then on. It lasts until the
lower level has achieved the goal, has acted `every` times, or a level above is done. The lower level's actions for one
goal are a separate episode within the environment's: terminated if the goal is achieved, otherwise truncated, as in
hierarchical actor-critic (Levy et al. 2019). All randomness (tests of subgoals) follows from the seed of the episode.

`Options`: two agents share a policy, as in Scalable Option Learning (SOL, Henaff et al. 2025). The `controller` chooses
an option and its number of steps; the `option` then acts in the environment, for a reward of its own. Both observe and
act in the same spaces; `option` in the observation says who acts. The action mask has a single legal choice where an
agent does not choose, and a 0 for boxes that it does not use, so these have no effect on learning
(shared/policies/masks.py). Nothing in it is random.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from stagecoach.rollout_worker.environments.action_masks import KEY, choices
from stagecoach.rollout_worker.environments.pettingzoo_env import Episode, Turns
from stagecoach.rollout_worker.environments.vector_env import GREEDILY, scalar
from stagecoach.shared.base.errors import ConfigError, EnvironmentUnusable
from stagecoach.shared.base.printable import counted
from stagecoach.shared.base.user_code import import_object, misfit
from stagecoach.shared.config.environments.hierarchy import HierarchyConfig, LevelConfig, OptionsConfig
from stagecoach.shared.config.schema.section import Numbers
from stagecoach.shared.experience.fragment import EpisodeRecord
from stagecoach.shared.experience.goals import ACHIEVED, BELOW, DESIRED, MISSED, reached
from stagecoach.shared.experience.spaces import Array, Columns

_TESTS = 1
"""Distinguishes the random stream of subgoal tests from others of the same seed."""


class _Goal:
    """Goal for some elements of a leaf of the observation."""

    def __init__(self, level: LevelConfig, where: str, observed: Mapping[str, spaces.Space[Any]]) -> None:
        self._leaf, self.threshold = level.of, level.threshold
        space = observed.get(self._leaf)
        if not isinstance(space, spaces.Box | spaces.MultiBinary):
            known = sorted(key for key, its in observed.items() if isinstance(its, spaces.Box | spaces.MultiBinary))
            raise ConfigError(
                f"{where} needs {self._leaf!r} in the environment's observation, as an array; it has {known}: name one "
                f"of these in {where}.of (and its elements), or use an environment with a goal"
            )
        size = math.prod(space.shape or ())
        self._elements = list(range(size) if level.elements is None else level.elements)
        if not self._elements or max(self._elements) >= size or len({*self._elements}) < len(self._elements):
            raise ConfigError(
                f"{where}.elements={self._elements}: {self._leaf!r} has {size} elements; name some of 0 to "
                f"{size - 1}, each once"
            )
        own = (space.low, space.high) if isinstance(space, spaces.Box) else (np.zeros(size), np.ones(size))
        given = zip((level.low, level.high), own, ("low", "high"), strict=True)
        low, high = (self._bound(number, its, f"{where}.{name}") for number, its, name in given)
        if not (low < high).all():
            raise ConfigError(f"{where}: low={low.tolist()} is not below high={high.tolist()}; correct one of them")
        if isinstance(self.threshold, tuple):
            _as_many(self.threshold, len(self._elements), f"{where}.threshold")
        self.space = spaces.Box(low, high, dtype=np.float32)

    def _bound(self, given: Numbers | None, own: Array, field: str) -> Array:
        bound = own.reshape(-1)[self._elements] if given is None else _as_many(given, len(self._elements), field)
        if not np.isfinite(bound).all():
            raise ConfigError(f"{field} is not given, and {self._leaf!r} is unbounded; set the range of goals")
        return bound.astype(np.float32)

    def achieved(self, seen: Mapping[str, Any]) -> Array:
        return np.asarray(seen[self._leaf], np.float32).reshape(-1)[self._elements]

    def shown(self, seen: Mapping[str, Any], directive: Array) -> dict[str, Any]:
        rest = {name: value for name, value in seen.items() if name not in (ACHIEVED, DESIRED)}
        return {**rest, ACHIEVED: self.achieved(seen), DESIRED: directive}

    def shown_space(self, observed: Mapping[str, spaces.Space[Any]]) -> dict[str, spaces.Space[Any]]:
        anything = spaces.Box(-np.inf, np.inf, self.space.shape, np.float32)
        rest = {name: space for name, space in observed.items() if name not in (ACHIEVED, DESIRED)}
        return {**rest, ACHIEVED: anything, DESIRED: self.space}


def _as_many(given: Numbers, count: int, field: str) -> Array:
    if isinstance(given, tuple) and len(given) != count:
        raise ConfigError(
            f"{field}={list(given)}, and the goal has {counted(count, 'element')}; give a number for each, or one "
            f"without brackets for all"
        )
    return np.broadcast_to(np.asarray(given, np.float32), (count,))


class GameOfOne:
    """Gymnasium environment as a game in turns, like PettingZoo's AEC environments. The last of `agents` acts."""

    metadata = {"name": "hierarchy", "is_parallelizable": False}

    def __init__(self, env: gym.Env[Any, Any], agents: list[str], max_episode_steps: int | None) -> None:
        self.env, self.possible_agents = env, agents
        self._limit = max_episode_steps or (env.spec.max_episode_steps if env.spec else None)
        self._bare = not isinstance(env.observation_space, spaces.Dict)

    def __getattr__(self, name: str) -> Any:
        """Forwards other attributes (`render`, `close` …) to the environment."""
        if name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)

    def _named(self, value: Any) -> Mapping[str, Any]:
        """Returns an observation, or its space, by leaf."""
        if self._bare:
            return {"observation": value}
        return value.spaces if isinstance(value, spaces.Dict) else value

    @property
    def agent_selection(self) -> str:
        """Agent that acts next: the lowest level with a directive."""
        return self.agents[-1]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        observation, self._info = self.env.reset(seed=seed, options=options)
        self._seen = self._named(observation)
        self.episode_return = 0.0
        self.agents = self.possible_agents[:1]
        names = self.possible_agents
        self.rewards, self._cumulative_rewards = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
        self.terminations, self.truncations = dict.fromkeys(names, False), dict.fromkeys(names, False)

    def agent_iter(self) -> Iterator[str]:
        while self.agents:
            yield self.agent_selection

    def last(self) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        agent = self.agent_selection
        reward = self._cumulative_rewards[agent]
        return self.observe(agent), reward, self.terminations[agent], self.truncations[agent], self.infos[agent]

    def step(self, action: Any) -> None:
        """Acts for `agent_selection`; None removes an agent whose episode is over."""
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self.agents.pop()
        else:
            self._act(agent, action)

    def acts_greedily(self, agent: str) -> bool:
        return False


class Levels(GameOfOne):
    """Game of levels, whose agents have the names of their policies."""

    def __init__(self, env: gym.Env[Any, Any], config: HierarchyConfig, max_episode_steps: int | None) -> None:
        """Raises `ConfigError` if the levels do not fit the environment."""
        super().__init__(env, [level.policy for level in config.levels], max_episode_steps)
        self._config = config
        observed = self._named(env.observation_space)
        self._given: list[Any] = [None]
        for number, level in enumerate(config.levels[1:], 1):
            self._given.append(_Goal(level, f"environment.hierarchy.levels.{number}", observed))
        if config.reward_of(0) != "environment" and not {ACHIEVED, DESIRED} <= observed.keys():
            raise ConfigError(
                f"environment.hierarchy.levels.0.reward={config.reward_of(0)} needs an environment with {ACHIEVED} and "
                f"{DESIRED}, found {sorted(observed)}; use reward=environment, or an environment with a goal"
            )
        for number in range(1, len(self._given)):
            steps = (config.levels[number].every or 1) * config.actions_within(number)
            if self._limit and steps > self._limit:
                raise ConfigError(
                    f"environment.hierarchy.levels.{number}.every={config.levels[number].every} makes {steps} steps of "
                    f"the environment, and its episodes have {self._limit} at most; lower it, or raise "
                    f"environment.max_episode_steps"
                )
        self._spaces = {agent: self._observed_by(number, observed) for number, agent in enumerate(self.possible_agents)}
        self._random = np.random.default_rng()

    def _observed_by(self, number: int, observed: Mapping[str, spaces.Space[Any]]) -> spaces.Dict:
        shown = dict(observed) if number == 0 else self._given[number].shown_space(observed)
        if number + 1 < len(self._given):
            below = self._given[number + 1]
            shown[BELOW] = spaces.Box(-np.inf, np.inf, below.space.shape, np.float32)
        return spaces.Dict(shown)

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self._spaces[agent]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        below = self.possible_agents.index(agent) + 1
        return self._given[below].space if below < len(self._given) else self.env.action_space

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        super().reset(seed, options)
        if seed is not None:
            self._random = np.random.default_rng([seed, _TESTS])
        count = len(self.possible_agents)
        self._directives: list[Any] = [None] * count
        self._acted, self._tested = [0] * count, [False] * count
        self._missed = [math.nan] * count
        self._goals, self._achieved = [0] * count, [0] * count

    def observe(self, agent: str) -> dict[str, Any]:
        number = self.possible_agents.index(agent)
        seen = dict(self._seen) if number == 0 else self._given[number].shown(self._seen, self._directives[number])
        if BELOW in self._spaces[agent].spaces:
            seen[BELOW] = self._given[number + 1].achieved(self._seen)
        return seen

    @property
    def infos(self) -> dict[str, dict[str, Any]]:
        """Infos by agent: the environment's or the share of achieved goals, and whether a tested subgoal was missed."""
        found: dict[str, dict[str, Any]] = {}
        for number, agent in enumerate(self.possible_agents):
            info = {"goals_achieved": self._achieved[number] / max(1, self._goals[number])} if number else self._info
            found[agent] = {**info, MISSED: self._missed[number]}
        return found

    def acts_greedily(self, agent: str) -> bool:
        """Returns whether the goal of a level above the agent is being tested."""
        return self._tested[self.possible_agents.index(agent)]

    def _act(self, agent: str, action: Any) -> None:
        self._cumulative_rewards[agent] = 0.0
        if len(self.agents) < len(self.possible_agents):
            self._direct(len(self.agents), action)
        else:
            self._step_environment(action)

    def _direct(self, number: int, directive: Any) -> None:
        agent = self.possible_agents[number]
        self.agents.append(agent)
        self._directives[number], self._acted[number] = np.array(directive), 0
        self._cumulative_rewards[agent] = 0.0
        self.terminations[agent] = self.truncations[agent] = False
        drawn = self._config.test_subgoals > 0 and self._random.random() < self._config.test_subgoals
        self._tested[number] = self._tested[number - 1] or drawn
        self._missed[number - 1] = math.nan

    def _step_environment(self, action: Any) -> None:
        observation, reward, terminated, truncated, self._info = self.env.step(action)
        self._seen = self._named(observation)
        self.episode_return += float(reward)
        achieved = [self._is_achieved(number) for number in range(len(self.possible_agents))]
        terminated |= achieved[0]
        for number, agent in enumerate(self.possible_agents):
            if self._config.reward_of(number) == "environment":
                self._cumulative_rewards[agent] += float(reward)
        for number in reversed(range(len(self.possible_agents))):
            self._count(number, achieved[number])
            timed_out = number > 0 and self._acted[number] >= (self._config.levels[number].every or 0)
            if not (terminated or truncated or timed_out or any(achieved[: number + 1])):
                return
            agent = self.possible_agents[number]
            # a level that is paid for its goal does not fail if the environment ends
            dies = number == 0 or self._config.reward_of(number) == "environment"
            self.terminations[agent] = achieved[number] or (dies and bool(terminated))
            self.truncations[agent] = not self.terminations[agent]
            self._goals[number] += 1
            self._achieved[number] += achieved[number]
            if self._tested[number] and (achieved[number] or timed_out):
                self._missed[number - 1] = float(not achieved[number])

    def _count(self, number: int, achieved: bool) -> None:
        """Counts a completed action of this level, and sets its reward."""
        self._acted[number] += 1
        kind, agent = self._config.reward_of(number), self.possible_agents[number]
        if kind == "sparse":
            self._cumulative_rewards[agent] = float(achieved) - 1
        elif kind == "distance":
            apart, desired = self._goal(number)
            self._cumulative_rewards[agent] = -float(np.linalg.norm(apart.astype(np.float64) - desired))

    def _goal(self, number: int) -> tuple[Array, Array]:
        """Returns the achieved values for this level's goal, and the goal."""
        if number == 0:
            return np.asarray(self._seen[ACHIEVED]), np.asarray(self._seen[DESIRED])
        return self._given[number].achieved(self._seen), self._directives[number]

    def _is_achieved(self, number: int) -> bool:
        """Returns whether this level's goal is achieved; for the top level only with a sparse reward."""
        if number == 0 and self._config.reward_of(0) != "sparse":
            return False
        achieved, desired = self._goal(number)
        return bool(reached(achieved[None], desired[None], self._config.levels[number].threshold)[0])


class LevelTurns(Turns):
    """Copies of a game of levels or options. An episode's return is the environment's; each agent's turn is a step."""

    _envs: Any

    def _record(self, index: int, episode: Episode) -> EpisodeRecord:
        found = super()._record(index, episode)
        found.episode_return = self._envs[index].episode_return
        return found

    def _stacked(self, policy_id: str) -> tuple[Columns, Array]:
        rows, acts = super()._stacked(policy_id)
        greedy = np.array([env.acts_greedily(agent) for agent in self._agents[policy_id] for env in self._envs])
        return rows, np.where(acts & greedy, GREEDILY, acts).astype(np.int8)


CONTROLLER, OPTION = "controller", "option"
_WHERE = "environment.hierarchy.options"


class Options(GameOfOne):
    """Game of a controller and its options. Each run of an option is a separate episode: terminated with the
    environment's, truncated when its time is over. Actions are `{action: …, length: its index, option: its index}`."""

    def __init__(
        self, env: gym.Env[Any, Any], config: OptionsConfig, max_episode_steps: int | None, masked: bool
    ) -> None:  # fmt: skip
        """Raises `ConfigError` if options do not fit the environment, or a reward cannot be imported."""
        super().__init__(env, [CONTROLLER, OPTION], max_episode_steps)
        self._config = config
        if self._limit and max(config.lengths) > self._limit:
            raise ConfigError(
                f"{_WHERE}.lengths has {max(config.lengths)}, and the environment's episodes have {self._limit} steps "
                f"at most; remove longer lengths, or raise environment.max_episode_steps"
            )
        self._rewards = [_reward(named, f"{_WHERE}.rewards.{at}") for at, named in enumerate(config.rewards)]
        self._untried = True
        observed, sizes = dict(self._named(env.observation_space)), choices(env.action_space)
        own, boxes = [size for size in sizes if size], [1 for size in sizes if not size]
        mask = observed.pop(KEY, None)
        self._masked = masked and mask is not None and mask.shape == (sum(own),)
        if OPTION in observed or (mask is not None and not self._masked):
            raise ConfigError(
                f"{_WHERE}: the environment observes {(OPTION if OPTION in observed else KEY)!r}, a name that "
                f"controller and options need; rename it"
            )
        count = len(config.rewards)
        lengths, options = spaces.Discrete(len(config.lengths)), spaces.Discrete(count)
        above = [*choices(lengths), *choices(options)]
        self._legal = {
            CONTROLLER: (_mask(own, first=True), _mask(above), 0 * _mask(boxes)),
            OPTION: (_mask(own), _mask(above, first=True), _mask(boxes)),
        }
        size = sum([*own, *above, *boxes])
        observed |= {OPTION: spaces.Discrete(count + 1), KEY: spaces.Box(0, 1, (size,), np.int8)}
        self._spaces = spaces.Dict(observed), spaces.Dict(action=env.action_space, length=lengths, option=options)

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self._spaces[0]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self._spaces[1]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        super().reset(seed, options)
        self._option, self._left = 0, 0
        self._chosen, self._planned = [0] * len(self._rewards), 0

    def observe(self, agent: str) -> dict[str, Any]:
        """Returns the observation; `option` is the acting option, or for the controller the number of options."""
        own, *others = self._legal[agent]
        if self._masked and agent == OPTION:
            own = np.asarray(self._seen[KEY], np.int8)
        number = self._option if agent == OPTION else len(self._rewards)
        return {**self._seen, OPTION: number, KEY: np.concatenate([own, *others])}

    @property
    def infos(self) -> dict[str, dict[str, Any]]:
        """Infos by agent: for the controller the environment's, each option's share of choices, and the mean length."""
        count = max(1, sum(self._chosen))
        shares = {f"share_of_{name}": its / count for name, its in zip(self._config.names, self._chosen, strict=True)}
        return {CONTROLLER: {**self._info, **shares, "option_length": self._planned / count}, OPTION: {}}

    def _act(self, agent: str, action: Any) -> None:
        if agent == OPTION:
            self._step_environment(action["action"])
        else:
            self._option, self._left = int(action["option"]), self._config.lengths[int(action["length"])]
            self._chosen[self._option] += 1
            self._planned += self._left
            self.agents.append(OPTION)
            self.terminations[OPTION] = self.truncations[OPTION] = False
            self._cumulative_rewards = dict.fromkeys(self.possible_agents, 0.0)

    def _step_environment(self, action: Any) -> None:
        tried = range(len(self._rewards)) if self._untried else (self._option,)
        before = copy.deepcopy(self._seen) if any(callable(self._rewards[each]) for each in tried) else {}
        observation, reward, terminated, truncated, self._info = self.env.step(action)
        self._seen = self._named(observation)
        self.episode_return += float(reward)
        self._left -= 1
        # The first step computes each reward, so that a wrong one is detected before a run begins.
        paid = {each: self._paid(each, before, action, float(reward)) for each in tried}
        self._untried = False
        self._cumulative_rewards[CONTROLLER] += float(reward)
        self._cumulative_rewards[OPTION] = paid[self._option]
        self.terminations = dict.fromkeys(self.possible_agents, bool(terminated))
        cut = bool(truncated) and not terminated
        self.truncations = {CONTROLLER: cut, OPTION: cut or (self._left == 0 and not terminated)}

    def _paid(self, number: int, before: Mapping[str, Any], action: Any, reward: float) -> float:
        """Returns an option's reward for this step; raises `EnvironmentUnusable` if it is not a number."""
        kind, named = self._rewards[number], f"{_WHERE}.rewards.{number}={self._config.rewards[number]}"
        if kind is None:
            return reward
        if callable(kind):
            after = copy.deepcopy(self._seen)
            seen = (before["observation"], after["observation"]) if self._bare else (before, after)
            found = kind(seen[0], action, seen[1], dict(self._info))
        elif kind not in self._info:
            raise EnvironmentUnusable(
                f"{named}: the info of a step has only {sorted(map(str, self._info))}; name one that each step "
                f"has, or a function as module:function"
            )
        else:
            found = self._info[kind]
        if not (told := scalar(named, found)):
            raise EnvironmentUnusable(f"{named} is {found!r:.60} in a step; expected a finite number; correct it")
        return told[named]


def _reward(named: str, field: str) -> Callable[..., Any] | str | None:
    """Returns a function, the name of a number in `info`, or None for the environment's own reward."""
    if ":" not in named:
        return None if named == "environment" else named
    found = import_object(named, field, kind="function")
    if not callable(found) or misfit(found, None, None, None, None):
        raise ConfigError(f"{field}={named}: expected a function (before, action, after, info), found {found!r:.60}")
    return found  # type: ignore[no-any-return]


def _mask(sizes: list[int], first: bool = False) -> Array:
    """Returns a mask of all options of each choice, or of the first one only."""
    legal = [np.arange(size) == 0 if first else np.ones(size, np.bool_) for size in sizes]
    return np.concatenate([np.zeros(0, np.int8), *legal]).astype(np.int8)
