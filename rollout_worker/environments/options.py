"""Options with one controller: a Gymnasium environment as a game in turns of two agents that share a policy
(`environment.hierarchy.options`), as in Scalable Option Learning (SOL, Henaff et al. 2025).

The `controller` chooses an option and its number of steps; the `option` then acts in the environment, for a reward of
its own. Both observe and act in the same spaces; `option` in the observation says who acts. The action mask has a
single legal choice where an agent does not choose, and a 0 for boxes that it does not use, so these have no effect on
learning (shared/policies/masks.py). Nothing here is random.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from stagecoach.rollout_worker.environments.action_masks import KEY, choices
from stagecoach.rollout_worker.environments.levels import GameOfOne
from stagecoach.rollout_worker.environments.vector_env import scalar
from stagecoach.shared.base.errors import ConfigError, EnvironmentUnusable
from stagecoach.shared.base.user_code import import_object, misfit
from stagecoach.shared.config.environments.hierarchy import OptionsConfig
from stagecoach.shared.experience.spaces import Array

CONTROLLER, OPTION = "controller", "option"
_WHERE = "environment.hierarchy.options"


class Options(GameOfOne):
    """Game of a controller and its options.

    Each run of an option is a separate episode: terminated with the environment's, truncated when its time is over. An
    action is `{action: the environment's, length: index of a length, option: index of an option}`.
    """

    def __init__(
        self, env: gym.Env[Any, Any], config: OptionsConfig, max_episode_steps: int | None, masked: bool
    ) -> None:  # fmt: skip
        """Uses the `action_mask` in the environment's observation if `masked`. Raises `ConfigError` if options do not
        fit the environment, or a reward cannot be imported."""
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
        self._begin(seed, options)
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

    def step(self, action: Any) -> None:
        """Acts for `agent_selection`; None removes an agent whose episode is over."""
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self.agents.pop()
        elif agent == OPTION:
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
