"""Tries an environment in a process of its own: describes its agents and spaces, and lists everything wrong with it.

Input, JSON: `config` (of the run), `steps`, `seed`, `deadline_seconds` for each call,
`whole` (also check that the environment follows its seed), `alone` (without a run: each agent gets a separate policy)
and `any_api` (accept a PettingZoo environment whatever the config says). Output on standard output, one line of JSON
each: the call it is `doing`, a `problem`, the `description`, and `done`. A call beyond the deadline ends the process;
its stack is on standard error. Imports neither torch nor ray, so that it starts quickly.
"""

import contextlib
import faulthandler
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np
from gymnasium import spaces
from gymnasium.utils.env_checker import data_equivalence

from stagecoach.rollout_worker.environments import vector_env
from stagecoach.rollout_worker.environments.action_masks import KEY, choices, from_info
from stagecoach.rollout_worker.environments.checking.native import NativeTrial
from stagecoach.rollout_worker.environments.checking.report import (
    FATAL,
    NOTE,
    WRONG,
    Report,
    Unsteppable,
    check_outcome,
    check_value,
    shown,
)
from stagecoach.rollout_worker.environments.description import SINGLE_AGENT, check_evaluation, describe
from stagecoach.rollout_worker.environments.factory import is_factory, make_environment
from stagecoach.rollout_worker.environments.seeding import SEEDS
from stagecoach.rollout_worker.environments.vector_env import pick
from stagecoach.shared.base.errors import OtherApi, StagecoachError, UserError
from stagecoach.shared.base.printable import counted
from stagecoach.shared.base.process import report_exits
from stagecoach.shared.config.loading import parse_config
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.config.sections import RunPolicyConfig
from stagecoach.shared.experience.spaces import Array, EnvironmentDescription, PolicySpaces

_STEP = "step() that returns (observation, reward, terminated, truncated, info)"
_COMPARED_STEPS = 20
_GRAY = 16
"""Shortest side of an array that may be meant as an image."""


class Check:
    """Tries one environment. A Gymnasium environment counts as one with a single agent."""

    def __init__(
        self, config: Config, seed: int, deadline_seconds: float | None, send: Callable[[dict[str, Any]], None]
    ):
        self._config, self._seed, self._report = config, seed, Report(deadline_seconds, send)
        self._many = config.environment.several_agents
        self._random = np.random.default_rng(seed)
        self._spaces: dict[str, tuple[spaces.Space[Any], spaces.Space[Any]]] = {}
        self._masked: dict[str, PolicySpaces] = {}
        """Agents that act by an action mask."""
        self._infos: Mapping[str, Any] = {}
        self._outcomes: dict[str, str] = {}
        """Agent → reward and flags of its last step."""
        self._info_names: set[str] = set()
        self._mask_ignored = False
        """True if an `info` has a mask while the observation has none."""
        self._ended: set[str] = set()
        """Agents that have ended and are still in `env.agents`: they do not act."""

    def run(self, steps: int, whole: bool, alone: bool, any_api: bool = False) -> None:
        try:
            description = self._make(alone, any_api)
            if self._config.environment.vectorization == "native":
                self._step_native(description, steps)
            ended = self._play(steps)
            self._check_info(steps)
            if self._mask_ignored:
                found, remedy = f"info has an {KEY}, which nothing acts by", "set environment.action_mask: info, or off"
                self._report.add(NOTE, found, "one that is observed, with environment.action_mask=auto", remedy)
            if whole:
                self._check_seeds(steps)
                if not ended and not self._config.environment.max_episode_steps:
                    found = f"no episode ended within {counted(steps, 'step')}"
                    remedy = "set environment.max_episode_steps if none ever does"
                    self._report.add(NOTE, found, "episodes that end", remedy)
            self._report.guarded("close()", self._env.close)
        except Unsteppable:
            pass
        except (Exception, SystemExit) as error:  # such as an object that cannot even be inspected
            with contextlib.suppress(Unsteppable):
                self._report.raised("inspecting it", error)

    def _step_native(self, description: EnvironmentDescription, steps: int) -> None:
        def again() -> None:
            self._random = np.random.default_rng(self._seed)

        def act(observation: Any) -> Any:
            return self._actions({SINGLE_AGENT: observation})[SINGLE_AGENT]

        try:
            NativeTrial(self._report, self._config.environment, description, self._seed, act, again).run(steps)
        except StagecoachError as error:
            self._refuse(error)
        again()

    def _refuse(self, error: StagecoachError) -> NoReturn:
        self._report.send({"error": type(error).__name__, "text": str(error)})
        raise Unsteppable from None

    def _make(self, alone: bool, any_api: bool) -> EnvironmentDescription:
        environment = self._config.environment
        try:
            try:
                self._env = self._started()
            except OtherApi:
                if not any_api:
                    raise
                environment = environment.model_copy(update={"api": "pettingzoo"})
                self._config, self._many = self._config.model_copy(update={"environment": environment}), True
                self._env = self._started()
                found, expected = "it is a PettingZoo environment", "environment.api: pettingzoo in its config"
                self._report.add(NOTE, found, expected, "write that; it is taken for one here")
            if alone and self._many:
                each = {agent: agent for agent in self._env.possible_agents}
                policies = dict.fromkeys(each, RunPolicyConfig())
                self._config = self._config.model_copy(update={"agents": each, "policies": policies})
            description = describe(self._config, self._env)
            self._report.send({"description": description.as_dict()})
            self._report.calling("its start for evaluation", lambda: check_evaluation(self._config, description))
        except StagecoachError as error:
            self._refuse(error)
        reads = getattr(getattr(self._env, "unwrapped", self._env), "reset_options", None)
        if environment.parameters and environment.parameters_by == "options" and reads is None:
            found = "environment.parameters are given by reset(options=…), and it does not say which of them it reads"
            remedy = "add it, or use environment.parameters_by: attributes, or rebuild"
            self._report.add(NOTE, found, "an attribute reset_options, a list of their names", remedy)
        for agent in description.agents:
            observed, done = self._env.observation_space, self._env.action_space
            self._spaces[agent] = (observed(agent), done(agent)) if self._many else (observed, done)
            if (described := description.policies[description.agents[agent]]).observation.mask_columns:
                self._masked[agent] = described
        self._check_images(description)
        if description.in_turns:
            self._env = OneAtATime(self._env)
        return description

    def _check_images(self, description: EnvironmentDescription) -> None:
        """Notes gray images without a channel axis, which no convolution would see."""
        for spaces_of in description.policies.values():
            for leaf in spaces_of.observation.leaves:
                if leaf.kind == "box" and leaf.dtype == "uint8" and len(leaf.shape) == 2 and min(leaf.shape) >= _GRAY:
                    where = f"observation {leaf.path}" if leaf.path else "observation"
                    found = f"the {where} is an array {list(leaf.shape)} of uint8, which is not seen as an image"
                    remedy = (
                        "wrap it with gymnasium.wrappers:ReshapeObservation (kwargs: {shape: "
                        f"{[*leaf.shape, 1]}}}), or FrameStackObservation; else it is flattened"
                    )
                    self._report.add(NOTE, found, "[height, width, channels] for convolutions", remedy)

    def _started(self) -> Any:
        environment = self._config.environment
        if is_factory(environment.id):  # a limit of ours around it would fail in place of what it wraps
            environment = environment.model_copy(update={"max_episode_steps": None})
        return self._report.calling("its start (__init__)", lambda: make_environment(environment))

    def _play(self, steps: int) -> bool:
        observations, ended = self._reset(self._seed), False
        for step in range(steps):
            observations, over = self._step(self._actions(observations))
            if over and step < steps - 1:
                ended, observations = True, self._reset(self._seed + step + 1)
        return ended

    def _reset(self, seed: int) -> dict[str, Any]:
        try:
            options = {} if self._many else {"options": None}
            result = self._report.calling("reset()", lambda: self._env.reset(seed=seed % SEEDS, **options))
        except TypeError as error:
            lacks = next((name for name in ("seed", "options") if f"argument '{name}'" in str(error)), None)
            if lacks is None:
                self._report.raised("reset()", error)
            found = f"reset() takes no {lacks} ({error})"
            self._report.add(FATAL, found, "reset(*, seed=None, options=None)", "add both arguments")
            taken = {"seed": seed % SEEDS} if lacks == "options" else {}
            result = self._report.guarded("reset()", lambda: self._env.reset(**taken))
        except (Exception, SystemExit) as error:
            self._report.raised("reset()", error)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            found, expected = f"reset() returned {shown(result)}", "reset() that returns (observation, info)"
            self._report.add(FATAL, found, expected, "this is the interface of old Gym: return (observation, {})")
            result = (result[0] if isinstance(result, tuple) and result else result), {}
        self._infos, self._ended = result[1], set()
        agents = list(getattr(self._env, "agents", [])) if self._many else [SINGLE_AGENT]
        if not agents or set(agents) - set(self._spaces):
            expected = f"some of possible_agents={list(self._spaces)}"
            self._report.fatal(f"agents={agents} after reset()", expected, "fill it in reset()")
        return self._observed("reset()", result[0], agents)

    def _by_agent(self, found: str, value: Any) -> Mapping[str, Any]:
        if self._many and not isinstance(value, Mapping):
            self._report.fatal(found, "a dict of one value for each agent", "return such a dict")
        return value if self._many else {SINGLE_AGENT: value}

    def _whose(self, agent: str) -> str:
        return f" for {agent}" if self._many else ""

    def _observed(self, call: str, observation: Any, agents: list[str]) -> dict[str, Any]:
        given = self._by_agent(f"{call} returned {shown(observation)}", observation)
        for agent in agents:
            if agent not in given:
                found = f"{call} returned no observation{self._whose(agent)}"
                self._report.fatal(found, "one for each agent in agents", "add it")
            what = f"{call} returned an observation{self._whose(agent)}"
            check_value(self._report, what, given[agent], self._spaces[agent][0])
        return {agent: given[agent] for agent in agents}

    def _actions(self, observations: Mapping[str, Any]) -> dict[str, Any]:
        actions = {}
        for agent in observations:
            space = self._spaces[agent][1]
            space.seed(int(self._random.integers(2**31)))
            actions[agent] = space.sample()
            if not space.contains(actions[agent]):
                found = f"the action space {space} does not contain its own sample {shown(actions[agent])}"
                self._report.add(WRONG, found, "a space that contains what it samples", "correct its bounds and dtype")
            if agent in self._masked:
                actions[agent] = self._legal(agent, observations[agent], actions[agent])
        return actions

    def _legal(self, agent: str, observation: Any, action: Any) -> Any:
        """Returns the action with each of its choices drawn from the legal choices."""
        masked = self._masked[agent]
        if self._config.environment.api == "pettingzoo" and self._config.environment.action_mask == "info":
            size, told = sum(choices(self._spaces[agent][1])), self._infos.get(agent, {})
            observation = self._report.guarded("step()", lambda: from_info(observation, told, size))
        seen = {name: array[None] for name, array in masked.observation.own.flatten("obs", observation).items()}
        if masked.without_legal(seen).any():
            found = f"the action_mask{self._whose(agent)} has no legal action, and the episode continues"
            self._report.fatal(found, "one at least for each choice", "mark it, or end the episode")
        legal = np.concatenate([seen[name].reshape(-1) for name in masked.observation.mask_columns]) > 0
        columns, first = masked.action.flatten("action", action), 0
        for leaf in masked.action.leaves:
            drawn: list[Array] = []
            for options in leaf.nvec:
                drawn.append(self._random.choice(np.flatnonzero(legal[first : first + options])))
                first += options
            if leaf.nvec:
                columns[leaf.column("action")] = np.array(drawn, np.int64).reshape(leaf.shape)
        return pick(masked.action.to_environment({name: array[None] for name, array in columns.items()}), 0)

    def _step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """Returns the observations of the agents that act next, and whether the episode is over."""
        given = actions if self._many else actions[SINGLE_AGENT]
        result = self._report.guarded("step()", lambda: self._env.step(given))
        if isinstance(result, tuple) and len(result) == 4:
            what = "step() returned 4 values (observation, reward, done, info)"
            remedy = "this is the interface of old Gym: split done into terminated and truncated"
            self._report.add(FATAL, what, _STEP, remedy)
            result = (*result[:3], {} if self._many else False, result[3])
        if not (isinstance(result, tuple) and len(result) == 5):
            self._report.fatal(f"step() returned {shown(result)}", _STEP, "return these five")
        observation, *outcomes, info = result
        if not isinstance(info, dict):
            found = f"step() returned {shown(info)} as info"
            self._report.add(FATAL, found, "a dict", "return {} where there is nothing to say")
        else:
            self._infos = info
            each = info.values() if self._many else [info]
            if no_dicts := [agent for agent, its in info.items() if self._many and not isinstance(its, dict)]:
                found = f"step() returned {shown(info[no_dicts[0]])} as the info of {no_dicts[0]}"
                self._report.fatal(found, "a dict for each agent", "return {} where there is nothing to say")
            self._info_names |= {name for its in each if isinstance(its, dict) for name in vector_env.numbers(its)}
            if not self._masked and any(isinstance(its, dict) and KEY in its for its in each):
                self._mask_ignored = self._config.environment.action_mask == "auto"
        by_agent = [self._by_agent(f"step() returned {shown(item)}", item) for item in outcomes]
        over, self._outcomes = {}, {}
        for agent in actions:
            values = [item.get(agent) for item in by_agent]
            self._outcomes[agent] = repr(values)  # whatever they are
            over[agent] = check_outcome(self._report, self._whose(agent), *values)
        left = set(self._env.agents) if self._many else {SINGLE_AGENT}
        on = [agent for agent in actions if not over[agent] and agent in left]
        self._ended = {agent for agent in self._spaces if (over.get(agent) or agent in self._ended) and agent in left}
        new = [agent for agent in left - set(actions) - self._ended if self._many and agent in self._spaces]
        if (on or new) and (staying := sorted(self._ended)) and self._many:
            found = f"env.agents still has {', '.join(staying)} after terminated or truncated"
            expected = "only agents that act on: these do not act until they were away for a step"
            self._report.add(NOTE, found, expected, "take them out of agents in the step in which they end")
        return self._observed("step()", observation, [*on, *new] if self._many else [SINGLE_AGENT]), not (on or new)

    def _check_info(self, steps: int) -> None:
        if missing := [name for name in self._config.environment.info_columns if name not in self._info_names]:
            numbers = ", ".join(sorted(self._info_names)) or "none"
            found = f"info never had {', '.join(missing)} in {counted(steps, 'step')}; its numbers are: {numbers}"
            expected = "a number in each step's info for each of environment.info_columns (without one it is NaN)"
            self._report.add(WRONG, found, expected, "return it, or leave the name out")

    def _check_seeds(self, steps: int) -> None:
        first, second = (self._episode(min(steps, _COMPARED_STEPS)) for _ in range(2))
        for number, (one, other) in enumerate(zip(first, second, strict=False)):
            if not data_equivalence(one, other):
                what = "observations" if not number or not data_equivalence(one[0], other[0]) else "rewards or ends"
                when = f"after {counted(number, 'step')}" if number else "from the first"
                found = f"two episodes with the seed {self._seed} and equal actions are not the same: "
                remedy = "draw from self.np_random after super().reset(seed=seed), and reset all that is random there"
                self._report.add(WRONG, f"{found}{what} differ {when}", "an environment that follows its seed", remedy)
                return

    def _episode(self, steps: int) -> list[Any]:
        self._random = np.random.default_rng(self._seed)
        seen: list[Any] = [_copied(observations := self._reset(self._seed))]
        for _ in range(steps):
            observations, over = self._step(self._actions(observations))
            seen.append((_copied(observations), self._outcomes))
            if over:
                break
        return seen


class OneAtATime:
    """Game in turns with the methods of a parallel one, whose only agent is the one that acts next."""

    def __init__(self, env: Any) -> None:
        self._env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    @property
    def agents(self) -> list[str]:
        return [self._env.agent_selection] if self._env.agents else []

    def reset(self, *, seed: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self._env.reset(seed=seed)
        return self._turn()

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        ((agent, action),) = actions.items()
        self._env.step(action)
        rewards, over = self._env.rewards, (self._env.terminations, self._env.truncations)
        outcomes = [{agent: each.get(agent, default)} for each, default in zip((rewards, *over), (0.0, True, False))]
        seen, infos = self._turn()
        return (seen, *outcomes, infos)

    def _turn(self) -> tuple[dict[str, Any], dict[str, Any]]:
        infos: dict[str, Any] = {}
        while self._env.agents:
            agent = self._env.agent_selection
            observation, _, terminated, truncated, infos[agent] = self._env.last()
            if not (terminated or truncated):
                return {agent: observation}, infos
            self._env.step(None)
        return {}, infos


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _copied(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_copied, value))
    array = np.array(value)
    return np.nan_to_num(array) if array.dtype.kind == "f" else array  # NaN is equal to NaN here


def run(given: bytes, _: str) -> NoReturn:
    """Writes the findings; whatever the environment prints goes to standard error. Ends the process."""
    asked = json.loads(given)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    faulthandler.enable()
    end = os._exit
    report_exits()

    def send(line: dict[str, Any]) -> None:
        out.write(json.dumps(line) + "\n")

    try:
        check = Check(parse_config(asked["config"]), asked["seed"], asked["deadline_seconds"], send)
        check.run(asked["steps"], asked["whole"], asked["alone"], asked["any_api"])
    except UserError as error:
        send({"error": type(error).__name__, "text": str(error)})
    send({"done": True})
    end(0)  # not even its threads, or what it does at exit, may hold us up
