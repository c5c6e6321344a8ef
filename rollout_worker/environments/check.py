"""Trying an environment, in a process of its own: what its agents and spaces are, and everything that is wrong with it.

In, on standard input, JSON: `config` (of the run), `steps`, `seed`, `deadline_seconds` for each call, `import_path`,
`whole` (whether it is also to be seen if the environment follows its seed), `alone` (no run is meant: each agent
has a policy of its own), and `any_api` (it may be of PettingZoo, whatever the config says). Out, on standard output, a
line of JSON for each thing: what it is `doing`, a `problem`, the `description`, and `done`. A call that lasts longer
than the deadline ends the process; its stack is on standard error.
Imports neither torch nor ray, so that it begins within a moment.
"""

import contextlib
import faulthandler
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import numpy as np
from gymnasium import spaces
from gymnasium.utils.env_checker import data_equivalence

from rollout_worker.environments import vector_env
from rollout_worker.environments.action_masks import KEY, count_choices, from_info
from rollout_worker.environments.description import SINGLE_AGENT, check_evaluation, describe
from rollout_worker.environments.factory import is_factory, make_environment, make_native
from rollout_worker.environments.pettingzoo_env import OneAtATime
from rollout_worker.environments.seeding import SEEDS
from rollout_worker.environments.vector_env import OUTCOME, pick
from shared.config.loading import parse_config
from shared.config.run_config import Config
from shared.config.sections import RunPolicyConfig
from shared.errors import EnvironmentUnusable, OtherApi, StagecoachError, UserError
from shared.experience.fragment import LARGEST
from shared.experience.spaces import Array, PolicySpaces
from shared.printable import counted
from shared.runtime.process import tell_of_exits

FATAL, RAISED, WRONG, NOTE = "fatal", "raised", "wrong", "note"
"""A run cannot learn in it; it raised (`environment.failures_allowed` bears some); it is wrong; it does no harm."""
_STEP = "step() that returns (observation, reward, terminated, truncated, info)"
_NO_WARNING = "no warning"
_LARGEST = f"numbers up to {LARGEST:g}, beyond which nothing is learned"
_COMPARED_STEPS = 20
_LONGEST_SECONDS = 60.0
"""Of random steps, however many are asked for; each call has its own deadline."""


@dataclass(frozen=True)
class Problem:
    severity: str
    found: str
    expected: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.found}; expected {self.expected}; {self.remedy}"


class Unsteppable(Exception):
    """Nothing more can be found out: a problem was told that keeps from going on."""


class Report:
    """Makes the calls, each by its name and with a deadline, and tells what is wrong."""

    def __init__(self, deadline_seconds: float, tell: Callable[[dict[str, Any]], None]) -> None:
        self._deadline, self.tell = deadline_seconds, tell
        self._told: set[tuple[str, str]] = set()
        self._written: dict[str, list[int]] = {}
        """Call → bytes that it wrote to standard output or error, of each time that it wrote any."""

    def add(self, severity: str, found: str, expected: str, remedy: str) -> None:
        """Tells it once, however often it is found."""
        if (key := (expected, found if expected == _NO_WARNING else remedy)) not in self._told:
            self._told.add(key)
            self.tell({"problem": asdict(Problem(severity, found, expected, remedy))})

    def fatal(self, found: str, expected: str, remedy: str) -> NoReturn:
        """Tells what keeps from finding out anything more."""
        self.add(FATAL, found, expected, remedy)
        raise Unsteppable

    def raised(self, what: str, error: BaseException) -> NoReturn:
        frames = traceback.extract_tb(error.__traceback__)
        if isinstance(error, EnvironmentUnusable):  # of ours, which says what is wrong and what to do
            self.tell({"error": type(error).__name__, "text": str(error)})
            raise Unsteppable from None
        mine = [frame for frame in frames if frame.filename != __file__] or list(frames)
        raised = f"{type(error).__name__}: {' '.join(str(error).split())} (at {mine[-1].filename}:{mine[-1].lineno})"
        self.add(RAISED, f"{what} raised {raised}", "no exception", "mend the environment")
        raise Unsteppable from None

    def calling(self, what: str, call: Callable[[], Any]) -> Any:
        """One call with its name and its deadline; warnings of Gymnasium's own checkers are told as notes."""
        self.tell({"doing": what})
        faulthandler.dump_traceback_later(self._deadline, exit=True)
        before = _bytes_said()
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always", UserWarning)
                return call()
        finally:
            faulthandler.cancel_dump_traceback_later()
            if wrote := _bytes_said() - before:
                self._written.setdefault(what, []).append(wrote)
            for item in said:
                if issubclass(item.category, UserWarning):
                    text = " ".join(str(item.message).split()).removeprefix("\x1b[33mWARN:").removesuffix("\x1b[0m")
                    self.add(NOTE, f"{what} warns: {text.strip()}", _NO_WARNING, "see to it")

    def guarded(self, what: str, call: Callable[[], Any]) -> Any:
        """As `calling`; that it raises is a problem that keeps from going on."""
        try:
            return self.calling(what, call)
        except (Exception, SystemExit) as error:
            self.raised(what, error)

    def chatter(self) -> None:
        """Tells which calls write something; once may be a library's greeting."""
        for call in ("step()", "reset()"):
            if len(written := self._written.get(call, ())) > 1:
                found = f"{call} printed {counted(sum(written), 'byte')} in {counted(len(written), 'call')}"
                expected = "no output: it slows each step and floods the logs of the workers"
                self.add(NOTE, found, expected, f"take the print out of {call}, or put it behind a flag")


class Check:
    """One environment that is being tried. A Gymnasium environment is one with a single agent."""

    def __init__(self, config: Config, seed: int, deadline_seconds: float, tell: Callable[[dict[str, Any]], None]):
        self._config, self._seed, self._report = config, seed, Report(deadline_seconds, tell)
        self._many = config.environment.several_agents
        self._random = np.random.default_rng(seed)
        self._spaces: dict[str, tuple[spaces.Space[Any], spaces.Space[Any]]] = {}
        self._masked: dict[str, PolicySpaces] = {}
        """Of each agent that acts by an action mask."""
        self._infos: Mapping[str, Any] = {}
        self._outcomes: dict[str, str] = {}
        """Reward and flags of each agent's last step."""
        self._told: set[str] = set()
        """Names of the numbers that any step's `info` held."""
        self._mask_untaken = False
        """Whether an `info` has a mask, and what is observed has none."""

    def run(self, steps: int, whole: bool, alone: bool, any_api: bool = False) -> None:
        """Everything; problems are told as they are found. With `any_api` it may be of PettingZoo all the same."""
        try:
            self._make(alone, any_api)
            ended, played = self._play(steps)
            self._report.chatter()
            self._check_info(played)
            if self._mask_untaken:
                found, remedy = f"info has an {KEY}, which nothing acts by", "set environment.action_mask: info, or off"
                self._report.add(NOTE, found, "one that is observed, with environment.action_mask=auto", remedy)
            if whole:
                self._check_seeds(steps)
                if not ended and not self._config.environment.max_episode_steps:
                    found = f"no episode ended within {counted(played, 'step')}"
                    remedy = "set environment.max_episode_steps if none ever does"
                    self._report.add(NOTE, found, "episodes that end", remedy)
            self._report.guarded("close()", self._env.close)
        except Unsteppable:
            pass
        except (Exception, SystemExit) as error:  # what it holds is such that it cannot even be inspected
            with contextlib.suppress(Unsteppable):
                self._report.raised("inspecting it", error)

    def _make(self, alone: bool, any_api: bool) -> None:
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
            self._report.tell({"description": description.as_dict()})
            if environment.vectorization == "native":
                self._report.calling("the start of its native version", lambda: make_native(environment)).close()
            self._report.calling("its start for evaluation", lambda: check_evaluation(self._config, description))
        except StagecoachError as error:
            self._report.tell({"error": type(error).__name__, "text": str(error)})
            raise Unsteppable from None
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
        if description.in_turns:
            self._env = OneAtATime(self._env)

    def _started(self) -> Any:
        environment = self._config.environment
        if is_factory(environment.id):  # a limit of ours around it would fail in place of what it wraps
            environment = environment.model_copy(update={"max_episode_steps": None})
        return self._report.calling("its start (__init__)", lambda: make_environment(environment))

    def _play(self, steps: int) -> tuple[bool, int]:
        """Random actions; whether an episode has ended, and how many steps were done."""
        observations, ended = self._reset(self._seed), False
        kept: tuple[Any, Any] | None = None
        enough = time.monotonic() + _LONGEST_SECONDS
        for step in range(steps):
            if time.monotonic() > enough:
                found = f"{counted(step, 'step')} took {_LONGEST_SECONDS:g} s, so the rest of {steps:,} was left out"
                remedy = "raise rollout.workers or environment.num_envs if it is so slow"
                self._report.add(NOTE, found, "faster steps", remedy)
                return ended, step
            if kept is not None and not data_equivalence(_copied(kept[0]), kept[1]):
                found = "an observation changed after it was returned: its array is used again"
                expected = "a new array for each (Stagecoach copies them; others may not)"
                self._report.add(NOTE, found, expected, "return obs.copy()")
            kept = observations, _copied(observations)
            observations, over = self._step(self._actions(observations))
            if over and step < steps - 1:
                ended, kept = True, None
                observations = self._reset(self._seed + step + 1)
        return ended, steps

    def _reset(self, seed: int) -> dict[str, Any]:
        try:
            result = self._report.calling("reset()", lambda: self._env.reset(seed=seed % SEEDS))
        except TypeError as error:
            if "seed" not in str(error):
                self._report.raised("reset()", error)
            found = f"reset() takes no seed ({error})"
            self._report.add(FATAL, found, "reset(*, seed=None, options=None)", "add both arguments")
            result = self._report.guarded("reset()", lambda: self._env.reset())
        except (Exception, SystemExit) as error:
            self._report.raised("reset()", error)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            found, expected = f"reset() returned {_shown(result)}", "reset() that returns (observation, info)"
            self._report.add(FATAL, found, expected, "this is the interface of old Gym: return (observation, {})")
            result = (result[0] if isinstance(result, tuple) and result else result), {}
        self._infos = result[1]
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
        given = self._by_agent(f"{call} returned {_shown(observation)}", observation)
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
                found = f"the action space {space} does not contain its own sample {_shown(actions[agent])}"
                self._report.add(WRONG, found, "a space that contains what it samples", "correct its bounds and dtype")
            if agent in self._masked:
                actions[agent] = self._legal(agent, observations[agent], actions[agent])
        return actions

    def _legal(self, agent: str, observation: Any, action: Any) -> Any:
        """The action with each of its choices drawn from the legal ones."""
        masked = self._masked[agent]
        if self._config.environment.api == "pettingzoo" and self._config.environment.action_mask == "info":
            choices, told = count_choices(self._spaces[agent][1]), self._infos.get(agent, {})
            observation = self._report.guarded("step()", lambda: from_info(observation, told, choices))
        seen = {name: array[None] for name, array in masked.observation.own.flatten("obs", observation).items()}
        if masked.without_legal(seen).any():
            found = f"the action_mask{self._whose(agent)} has no legal action, and the episode goes on"
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
        """The observations of those who act on, and whether the episode is over."""
        given = actions if self._many else actions[SINGLE_AGENT]
        result = self._report.guarded("step()", lambda: self._env.step(given))
        if isinstance(result, tuple) and len(result) == 4:
            what = "step() returned 4 values (observation, reward, done, info)"
            remedy = "this is the interface of old Gym: split done into terminated and truncated"
            self._report.add(FATAL, what, _STEP, remedy)
            result = (*result[:3], {} if self._many else False, result[3])
        if not (isinstance(result, tuple) and len(result) == 5):
            self._report.fatal(f"step() returned {_shown(result)}", _STEP, "return these five")
        observation, *outcomes, info = result
        if not isinstance(info, dict):
            found = f"step() returned {_shown(info)} as info"
            self._report.add(FATAL, found, "a dict", "return {} where there is nothing to say")
        else:
            self._infos = info
            each = info.values() if self._many else [info]
            if no_dicts := [agent for agent, its in info.items() if self._many and not isinstance(its, dict)]:
                found = f"step() returned {_shown(info[no_dicts[0]])} as the info of {no_dicts[0]}"
                self._report.fatal(found, "a dict for each agent", "return {} where there is nothing to say")
            self._check_outcomes(each)
            self._told |= {name for its in each if isinstance(its, dict) for name in vector_env.numbers(its)}
            if not self._masked and any(isinstance(its, dict) and KEY in its for its in each):
                self._mask_untaken = self._config.environment.action_mask == "auto"
        by_agent = [self._by_agent(f"step() returned {_shown(item)}", item) for item in outcomes]
        over, self._outcomes = {}, {}
        for agent in actions:
            values = [item.get(agent) for item in by_agent]
            self._outcomes[agent] = repr(values)  # whatever they are
            over[agent] = check_outcome(self._report, self._whose(agent), *values)
        left = set(self._env.agents) if self._many else {SINGLE_AGENT}
        on = [agent for agent in actions if not over[agent] and agent in left]
        new = [agent for agent in left - set(actions) if self._many and agent in self._spaces]
        return self._observed("step()", observation, [*on, *new] if self._many else [SINGLE_AGENT]), not (on or new)

    def _check_outcomes(self, infos: Iterable[Mapping[str, Any]]) -> None:
        """Whether a league can judge a match by what is told of it."""
        told = [its[OUTCOME] for its in infos if OUTCOME in its] if self._config.league is not None else []
        for outcome in told:
            if not 0 <= vector_env.scalar(OUTCOME, outcome).get(OUTCOME, -1) <= 1:
                found = f"step() returned {_shown(outcome)} as info[{OUTCOME!r}]"
                self._report.add(WRONG, found, "a number from 0 (lost) to 1 (won)", "else the sides' returns decide")

    def _check_info(self, played: int) -> None:
        """Whether each column of `environment.info_columns` was told at all."""
        if missing := [name for name in self._config.environment.info_columns if name not in self._told]:
            numbers = ", ".join(sorted(self._told)) or "none"
            found = f"info never told {', '.join(missing)} in {counted(played, 'step')}; its numbers are: {numbers}"
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


def check_outcome(report: Report, whose: str, reward: Any, terminated: Any, truncated: Any) -> bool:
    """Reward and both flags of one agent; whether its episode is over."""
    shown = f"step() returned {_shown(reward)} as reward{whose}"
    try:
        number = float(reward)
    except (TypeError, ValueError):
        report.add(FATAL, shown, "a number", "return a float")
    else:
        found = f"step() returned {number:g} as reward{whose}"
        if not np.isfinite(number):
            report.add(FATAL, found, "a finite number", "look for a division by zero")
        elif abs(number) > LARGEST:
            report.add(FATAL, found, _LARGEST, "scale it down")
        if np.ndim(reward):
            report.add(WRONG, shown, "a number", "return float(reward)")
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, bool | np.bool_):
            usable = isinstance(flag, int | np.integer) or (isinstance(flag, np.ndarray) and flag.size == 1)
            found = f"step() returned {_shown(flag)} as {name}{whose}"
            report.add(WRONG if usable else FATAL, found, "a bool", f"return bool({name})")
    return bool(np.any(terminated)) or bool(np.any(truncated))


def check_value(report: Report, what: str, value: Any, space: spaces.Space[Any]) -> None:
    """Where a value does not fit its space: structure, shape, dtype, NaN, bounds."""
    shown, expected = f"{what}, {_shown(value)}", f"shape {space.shape} and dtype {space.dtype}"
    remedy = "return what the space says, or correct observation_space"
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = dict(space.spaces) if isinstance(space, spaces.Dict) else dict(enumerate(space.spaces))
        given = dict(enumerate(value)) if isinstance(value, tuple | list) else value
        if not isinstance(given, Mapping) or set(given) != set(parts):
            keys = sorted(map(str, given)) if isinstance(given, Mapping) else _shown(value)
            report.add(FATAL, f"{what} with {keys}", f"{sorted(map(str, parts))}", remedy)
            return
        for name, part in parts.items():
            check_value(report, f"{what} ({name})", given[name], part)
        return
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.asarray(None)
    bounded = array.dtype.kind in "buif" and array.size
    span = f"{what} from {float(array.min()):.6g} to {float(array.max()):.6g}" if bounded else ""
    if array.dtype.kind not in "buif":
        report.fatal(shown, expected, remedy)
    elif array.shape != space.shape:
        report.add(FATAL, shown, expected, remedy)
    elif array.dtype.kind == "f" and not np.isfinite(array).all():
        report.add(FATAL, f"{what} with NaN or infinity", "finite numbers", "look for a division by zero")
    elif bounded and np.abs(array.astype(np.float64)).max() > LARGEST:
        report.add(FATAL, span, _LARGEST, "scale it down")
    elif space.dtype is not None and not np.can_cast(array.dtype, space.dtype, "same_kind"):
        severity = FATAL if isinstance(space, spaces.Box) and array.dtype.kind == "f" else NOTE
        report.add(severity, f"{what} of dtype {array.dtype}", f"{space.dtype}", remedy)
    elif isinstance(space, spaces.Box) and space.dtype is not None:
        if not np.can_cast(array.dtype, space.dtype):
            report.add(NOTE, f"{what} of dtype {array.dtype}", f"{space.dtype} (it is converted)", remedy)
        if (array < space.low).any() or (array > space.high).any():
            bounds = f"numbers within the space's bounds, {space.low.min():.6g} to {space.high.max():.6g}"
            report.add(WRONG, span, bounds, remedy)
    elif not space.contains(value) and not space.contains(array.astype(space.dtype)):
        report.add(FATAL, shown, f"one of {space}", remedy)


def _bytes_said() -> int:
    """How much was written to standard output and error so far, which are one file (`main`)."""
    with contextlib.suppress(ValueError, OSError, AttributeError):  # the environment may have closed it
        sys.stdout.flush()
    return os.fstat(2).st_size


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _copied(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_copied, value))
    array = np.array(value)
    return np.nan_to_num(array) if array.dtype.kind == "f" else array  # NaN is equal to NaN here


def _shown(value: Any) -> str:
    """Its type, and its shape or what it is where that is short."""
    if isinstance(value, np.ndarray | np.generic):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "None" if value is None else f"{type(value).__name__} {repr(value)[:60]}"


def main() -> None:
    """Reads what is asked, and tells what it finds; whatever the environment prints goes to standard error."""
    asked = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    faulthandler.enable()
    end = os._exit
    tell_of_exits()

    def tell(line: dict[str, Any]) -> None:
        out.write(json.dumps(line) + "\n")

    sys.path[:] = asked["import_path"]  # as of the process that asks
    try:
        check = Check(parse_config(asked["config"]), asked["seed"], asked["deadline_seconds"], tell)
        check.run(asked["steps"], asked["whole"], asked["alone"], asked["any_api"])
    except UserError as error:
        tell({"error": type(error).__name__, "text": str(error)})
    tell({"done": True})
    end(0)  # not even its threads, or what it does at exit, may hold us up


if __name__ == "__main__":
    main()
