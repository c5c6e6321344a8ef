"""Vectorized Gymnasium environments: sync, async, and native, which a worker's successor resumes by plain state."""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from stagecoach.rollout_worker.environments import vector_env
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
from stagecoach.shared.base.errors import EnvironmentFailure, EnvironmentUnusable
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.experience.fragment import INFO, EpisodeRecord
from stagecoach.shared.experience.spaces import Array, Columns, EnvironmentDescription

_LOGGER = logging.getLogger("stagecoach.worker")
_PAST, _PARAMETERS = "stagecoach_past", "stagecoach_parameters"
"""Options of `reset`, per environment: actions to repeat, and the episodes' parameters."""
_ANSWERS_WITHIN = 5.0
"""Seconds that a call may still take when processes are closed; if one was killed, the others have answered by then."""
_FINAL_OBS = ("final_obs", "final_observation")
"""Entries of `info` with a SAME_STEP environment's last observations; the second is from before Gymnasium 1.0."""
SAME_STEP_EXPECTED = (
    "NEXT_STEP (the step after an end only resets, and pays 0), or AutoresetMode.SAME_STEP there and the last "
    "observations in info['final_obs']"
)
_RETURN, _SUMS = "stagecoach_return", "stagecoach_sums"
"""Entries of the info after repeated actions: the return and the sums of the configured numbers."""
_PLAIN = "plain "
"""Prefix of a native environment's own state in a position's."""


def declared_autoreset(env: gym.vector.VectorEnv[Any, Any, Any]) -> AutoresetMode | None:
    """Returns the mode in the environment's metadata; raises `EnvironmentUnusable` for an invalid value."""
    said = env.metadata.get("autoreset_mode")
    try:
        return None if said is None else AutoresetMode(said)
    except ValueError:
        raise EnvironmentUnusable(
            f"metadata['autoreset_mode'] of {type(env.unwrapped).__name__} is {said!r:.60}; expected "
            f"gymnasium.vector.AutoresetMode.NEXT_STEP, SAME_STEP or DISABLED"
        ) from None


_STEPPING = NamedFailures("step")


class GymnasiumEnvironments:
    """A Gymnasium vector environment, with the same steps in each autoreset mode."""

    def __init__(
        self, env: gym.vector.VectorEnv[Any, Any, Any], description: EnvironmentDescription, *, native: bool,
        parameters: EpisodeParameters | None = None,
    ) -> None:  # fmt: skip
        """Owns `env` from now on. A native one is seeded once for all copies."""
        ((self._policy, self._spaces),) = description.policies.items()
        self._env, self._native, self.num_envs = env, native, env.num_envs
        self._parameters = parameters
        self._declared = declared_autoreset(env)
        self.mode = self._declared
        """None without metadata, until the first episode ends."""
        self._seeds: Sequence[int] = ()
        self._returns = np.zeros(self.num_envs)
        self._lengths, self._episodes = (np.zeros(self.num_envs, np.int64) for _ in range(2))
        self._everyone = np.ones(self.num_envs, np.bool_)
        self._held, self._idle = False, ~self._everyone
        """Flag of `hold`, and the environments that wait or reset in the next step."""
        leaves = self._spaces.observation.leaves
        self._info_columns = description.info_columns
        self._sums = np.zeros((len(self._info_columns), self.num_envs))
        self._now: Columns = {}
        self._no_slots = np.zeros(0, np.int32)
        self._no_final = {leaf.column("final_obs"): np.zeros((0, *leaf.shape), leaf.column_dtype) for leaf in leaves}

    def reset(self, seeds: Sequence[int], past: RunningEpisodes | None = None) -> dict[str, tuple[Columns, Array]]:
        self._seeds = seeds
        self._episodes[:] = past.episodes if past else 0
        self._lengths[:] = past.lengths if past else 0
        seed = seeds[0] if self._native else self._episode_seeds(range(self.num_envs))
        options = self._drawn(() if past else range(self.num_envs))
        if past and not self._native:
            taken = self._spaces.action.to_environment
            each = ([pick(taken(its[self._policy]), i) for its in past.done(i)] for i in range(self.num_envs))
            options |= {_PAST: list(each)}
        with NamedFailures("reset"):
            observations, infos = self._env.reset(seed=seed, options=options or None)
        self._idle[:] = False
        self._now = self._spaces.observation.flatten("obs", observations)
        if past and self._native:
            self._restore(past.state)
        else:
            self._returns[:] = infos[_RETURN] if past else 0
            self._sums[:] = np.transpose(infos[_SUMS]) if past and self._info_columns else 0
        return {self._policy: (self._now, self._everyone.copy())}

    @property
    def position(self) -> Position | None:
        episodes = tuple(self._episodes.tolist())
        if not self._native:
            return Position(episodes, tuple(self._lengths.tolist()), self._returns)
        state = None if self._declared is None else plain_state(self._env)
        if state is None:
            return None
        state = {f"{_PLAIN}{name}": array for name, array in state.items()} | self._running() | self._now
        return Position(episodes, (0,) * self.num_envs, self._returns, state)

    def _running(self) -> Columns:
        """Returns what this object counts in running episodes, of a native environment."""
        counted = {"idle": self._idle, "lengths": self._lengths, "returns": self._returns, "sums": self._sums}
        return {f"running {name}": array for name, array in counted.items()}

    def _restore(self, state: Mapping[str, Array]) -> None:
        """Resumes a native environment; if that fails, the digest of its observations shows it."""
        try:
            inner = {name.removeprefix(_PLAIN): its for name, its in state.items() if name.startswith(_PLAIN)}
            now = {name: np.reshape(state[name], array.shape) for name, array in self._now.items()}
            restore(self._env, inner)
            for name, array in self._running().items():
                array[:] = state[name]
            self._now = now
        except (KeyError, TypeError, ValueError) as error:
            _LOGGER.warning("a native environment cannot resume: %s: %s", type(error).__name__, error)

    def _drawn(self, which: Iterable[int]) -> dict[str, Any]:
        """Returns the reset option with parameters; the environments `which` begin an episode and draw others."""
        if self._parameters is None:
            return {}
        for index in which:
            episode = int(self._episodes[index])
            self._parameters.begin(index, episode, episode_seed(self._seeds[index], episode))
        each = [dict(drawn.values) for drawn in self._parameters.now]
        if self._native:
            return {name: np.array([its[name] for its in each]) for name in each[0]}
        return {_PARAMETERS: each}

    def _episode_seeds(self, which: Iterable[int]) -> Any:
        seeds: list[int | None] = [None] * self.num_envs
        for index in which:
            seeds[index] = episode_seed(self._seeds[index], int(self._episodes[index]))
        return seeds

    def step(self, actions: Mapping[str, Columns]) -> Step:
        try:
            return self._step(actions)
        except (Exception, SystemExit) as error:
            raise _STEPPING.failure(error) from None

    def _step(self, actions: Mapping[str, Columns]) -> Step:
        taken = self._spaces.action.to_environment(actions[self._policy])
        observations, rewards, terminated, truncated, infos = self._env.step(taken)
        mask = self._everyone
        if (self._held or self.mode is not AutoresetMode.DISABLED) and self._idle.any():
            mask = ~self._idle
            if ((rewards != 0) | terminated | truncated)[self._idle].any():
                raise self._contradiction("it paid or ended an episode in the step after an end")
            rewards, terminated, truncated = np.where(mask, rewards, 0.0), terminated & mask, truncated & mask
        self._returns += rewards
        self._lengths += 1 if mask is self._everyone else mask
        done = terminated | truncated
        if self._native and done.any():
            self._observe_autoreset(infos, done)
        info = self._info_of_step(infos, done, mask)
        final, final_slots = self._no_final, self._no_slots
        episodes: list[tuple[int, EpisodeRecord]] = []
        if len(ended := done.nonzero()[0]):
            final_slots = ended.astype(np.int32)
            final = self._final_obs(observations, infos, final_slots)
            episodes = self._records(ended, infos)
            self._returns[ended] = 0
            self._sums[:, ended] = 0
            self._lengths[ended] = 0
            self._episodes[ended] += 1
            if self.mode is AutoresetMode.DISABLED:
                terminated, truncated = terminated.copy(), truncated.copy()  # a reset may write into its own
                rewards = np.array(rewards, np.float32)
                seeds = None if self._native else self._episode_seeds(ended.tolist())
                options = {"reset_mask": done, **self._drawn(ended.tolist())}
                observations, _ = self._env.reset(seed=seeds, options=options)
        if self.mode is AutoresetMode.NEXT_STEP:
            self._idle = done
        elif self._held:
            self._idle = self._idle | done
        self._now = self._spaces.observation.flatten("obs", observations)
        step = PolicyStep(
            self._now,
            np.asarray(rewards, np.float32), terminated, truncated, mask, final, final_slots, info,
            acts=~self._idle if self._held else None,
        )  # fmt: skip
        return Step({self._policy: step}, episodes)

    def _observe_autoreset(self, infos: dict[str, Any], done: Array) -> None:
        """Compares the behavior at an episode's end with the metadata; raises `EnvironmentFailure` if they differ."""
        final = next((name for name in _FINAL_OBS if name in infos), None)
        self.mode = self.mode or (AutoresetMode.SAME_STEP if final else AutoresetMode.NEXT_STEP)
        if self.mode is AutoresetMode.SAME_STEP:
            return
        if final:
            raise self._contradiction(f"info has {final}")
        steps: Any = getattr(self._env.unwrapped, "_elapsed_steps", None)
        if np.shape(steps) == done.shape and not np.asarray(steps)[done].any():
            raise self._contradiction("its _elapsed_steps is 0 where an episode has ended")

    def _contradiction(self, found: str) -> EnvironmentFailure:
        says = f"says {self._declared.name}" if self._declared else "is missing, which means NEXT_STEP"
        return EnvironmentFailure(
            f"{found}, as if it had reset in the step that ended it, but its metadata['autoreset_mode'] {says}; "
            f"expected {SAME_STEP_EXPECTED}"
        )

    def _info_of_step(self, infos: dict[str, Any], done: Array, mask: Array) -> Columns:
        """Returns the configured numbers of this step; after a reset in it, those of the episode's end."""
        found: Columns = {}
        for row, name in enumerate(self._info_columns):
            values = _number_of_each(infos, name, mask)
            if self.mode is AutoresetMode.SAME_STEP and done.any():
                values = np.where(done, _number_of_each(infos.get("final_info", {}), name, mask), values)
            found[INFO + name] = values
            self._sums[row] += np.nan_to_num(values)
        return found

    def _final_obs(self, observations: Any, infos: dict[str, Any], slots: Array) -> Columns:
        if self.mode is AutoresetMode.SAME_STEP:
            given = next((infos[name] for name in _FINAL_OBS if name in infos), None)
            last = [None if given is None else pick(given, i) for i in slots.tolist()]
            if any(each is None for each in last):
                raise EnvironmentFailure(
                    "it gave no info['final_obs'] in the step in which an episode ended, though it resets in it "
                    "(SAME_STEP); expected the last observation of each copy that ended: without it, a truncated "
                    "episode would be valued by the first observation of the next; return it, or reset one step later "
                    "(NEXT_STEP)"
                )
            rows = [self._spaces.observation.flatten("final_obs", each) for each in last]
            return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        flat = self._spaces.observation.flatten("final_obs", observations)
        return {name: array[slots] for name, array in flat.items()}

    def _records(self, ended: Array, infos: dict[str, Any]) -> list[tuple[int, EpisodeRecord]]:
        """Returns the records of the `ended` environments. Fast, since a thousand copies end some in each step."""
        if self.mode is AutoresetMode.SAME_STEP:
            infos = infos.get("final_info", {})
        names = [name for name, values in infos.items() if f"_{name}" in infos and np.ndim(values) == 1]
        records = []
        for index, total, length in zip(ended.tolist(), self._returns[ended].tolist(), self._lengths[ended].tolist()):
            metrics: dict[str, float] = {}
            for name in names:
                if infos[f"_{name}"][index]:
                    metrics |= vector_env.scalar(name, infos[name][index])
            metrics |= {f"{name}_sum": float(its[index]) for name, its in zip(self._info_columns, self._sums)}
            record = vector_env.episode_record(total, length, metrics)
            records.append((index, record if self._parameters is None else self._parameters.judged(index, record)))
        return records

    @NamedFailures("set_phase")
    def set_phase(self, phase: Phase) -> None:
        self._call_each("set_phase", str(phase))

    @NamedFailures("set_paused")
    def set_paused(self, paused: bool) -> bool:
        return self._call_each("set_paused", paused)

    @NamedFailures("hold")
    def hold(self, held: bool) -> None:
        self._held, self._idle = held, ~self._everyone
        made: Any = self._env
        made.call("hold", held)

    def _call_each(self, name: str, value: Any) -> bool:
        if self._native:
            return vector_env.call_layers(self._env, name, value)
        made: Any = self._env  # sync or async: both have it
        return any(made.call("call_layers", name, value))

    def close(self) -> None:
        close_vector(self._env)


def close_vector(env: gym.vector.VectorEnv[Any, Any, Any]) -> None:
    try:
        env.close(**({"timeout": _ANSWERS_WITHIN} if isinstance(env, gym.vector.AsyncVectorEnv) else {}))
    except Exception as error:  # such as a process that has died
        _LOGGER.warning("closing the environments failed: %s: %s", type(error).__name__, error)
        for process in getattr(env, "processes", ()):
            process.kill()
            process.join()
        env.closed = True


def _number_of_each(infos: Mapping[str, Any], name: str, mask: Array) -> Array:
    """Returns `[S]` numbers; a native environment may omit the mask `_name` if all copies have the number."""
    return vector_env.usable(infos.get(name), mask & infos.get(f"_{name}", True))


class GuardedEnvironment(gym.Wrapper[Any, Any, Any, Any]):
    """Turns exceptions of an environment into `EnvironmentFailure`, with its number, the place and the traceback. Infos
    are reduced to numbers (of an episode's last info all, else the configured), since others may break Gymnasium's
    vectorization. A reset repeats the actions in the option `_PAST` and applies `_PARAMETERS`, both per environment."""

    def __init__(
        self, env: gym.Env[Any, Any], index: int, info_columns: Sequence[str] = (),
        parameterized: Parameterized | None = None,
    ) -> None:  # fmt: skip
        super().__init__(env)
        self._parameterized = parameterized
        self._index, self._info_columns = index, info_columns
        self._held = False
        self._waiting: Any = None
        self._resetting, self._stepping = NamedFailures("reset", index), NamedFailures("step", index)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        own = dict(options or {})
        past, parameters = own.pop(_PAST, None), own.pop(_PARAMETERS, None)
        with self._resetting:
            if self._parameterized is not None and parameters is not None:
                self.env, more = self._parameterized.prepare(self.env, parameters[self._index])
                own |= more
            observation, _ = self.env.reset(seed=seed, options=own or None)
            total, sums = 0.0, np.zeros(len(self._info_columns))
            for action in past[self._index] if past else ():
                observation, reward, terminated, truncated, info = self.env.step(action)
                total += float(reward)
                sums += np.nan_to_num(vector_env.info_numbers(info, self._info_columns))
                if terminated or truncated:
                    break  # another episode than before: the successor compares digests and detects it
            self._waiting = observation if self._held else None
            return observation, {_RETURN: total, _SUMS: sums} if past else {}

    def hold(self, held: bool) -> None:
        """Makes the environment wait after its next reset, so that steps change nothing, or ends that."""
        self._held, self._waiting = held, None

    def call_layers(self, name: str, value: Any) -> bool:
        if self._parameterized is not None:
            return self._parameterized.call_layers(self.env, name, value)
        return vector_env.call_layers(self.env, name, value)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self._waiting is not None:
            return self._waiting, 0.0, False, False, {}
        try:
            observation, reward, terminated, truncated, info = self.env.step(action)
            if isinstance(reward, np.ndarray):
                reward = reward.item()  # some environments return one element; raises for more
            if terminated or truncated:
                return observation, reward, terminated, truncated, vector_env.numbers(info)
            if not self._info_columns:
                return observation, reward, terminated, truncated, {}
            named = {name: info[name] for name in self._info_columns if name in info}
            return observation, reward, terminated, truncated, vector_env.numbers(named)
        except (Exception, SystemExit) as error:
            raise self._stepping.failure(error) from None


_CONSTANT = ("metadata", "spec")
"""Attributes that Gymnasium defines and no step changes."""
_SPACES = (gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary)
_VALUES = "values"
"""Name of the numbers and generators, as JSON in bytes; an array is `array.ATTRIBUTE`."""


def plain_state(env: gym.vector.VectorEnv[Any, Any, Any]) -> Columns | None:
    """Returns arrays from which `restore` sets an equal environment to this state. Returns None for a wrapper, a view
    of another array, or any attribute but numbers, text, arrays, simple spaces and NumPy's generators."""
    found: Columns = {}
    values: dict[str, Any] = {}
    if env.unwrapped is not env or type(env).__basicsize__ > gym.vector.VectorEnv.__basicsize__:
        return None
    for name, value in vars(env).items():
        generator = _generator(value)
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.base is None:
            found[f"array.{name}"] = value
        elif generator is not None:
            values[name] = generator.bit_generator.state
        elif value is None or type(value) in (bool, int, float, str):
            values[name] = value
        elif type(value) not in _SPACES and name not in _CONSTANT:
            return None
    if len({id(array) for array in found.values()}) < len(found):
        return None
    try:
        return found | {_VALUES: np.frombuffer(json.dumps(values).encode(), np.uint8)}
    except TypeError:  # a generator with an array
        return None


def restore(env: gym.vector.VectorEnv[Any, Any, Any], state: Columns) -> None:
    """Inverts `plain_state` in an environment of the same config and seed; raises `ValueError` for others."""
    fresh = plain_state(env)
    if fresh is None or _kinds(fresh) != _kinds(state):
        raise ValueError(f"a state with {sorted(state)} is not one of {type(env).__name__}")
    values = json.loads(state[_VALUES].tobytes())
    if values.keys() != json.loads(fresh[_VALUES].tobytes()).keys():
        raise ValueError(f"a state with {sorted(values)} is not one of {type(env).__name__}")
    for name, value in values.items():
        if (generator := _generator(vars(env)[name])) is not None:
            generator.bit_generator.state = value
        else:
            setattr(env, name, value)
    for name in fresh.keys() - {_VALUES}:
        setattr(env, name.removeprefix("array."), state[name].copy())


def _kinds(state: Columns) -> dict[str, Any]:
    return {name: (array.shape, array.dtype) for name, array in state.items() if name != _VALUES}


def _generator(value: Any) -> np.random.Generator | None:
    if type(value) in _SPACES:
        value = value._np_random
    return value if isinstance(value, np.random.Generator) else None
