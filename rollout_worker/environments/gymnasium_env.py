"""Gymnasium's vectorized environments: sync, async and native."""

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
"""Options of `reset`: actions to do again, and the episodes' parameters; of each environment."""
_ANSWERS_WITHIN = 5.0
"""Seconds that a call may still take when processes are ended: where one was killed in it, the others have answered."""
_FINAL_OBS = ("final_obs", "final_observation")
"""Where SAME_STEP environments give last observations; the second is the name before gymnasium 1.0."""
SAME_STEP_EXPECTED = (
    "NEXT_STEP (the step after an end only resets, and pays 0), or AutoresetMode.SAME_STEP there and the last "
    "observations in info['final_obs']"
)
_RETURN, _SUMS = "stagecoach_return", "stagecoach_sums"
"""Entries of its info: what the actions have brought."""


def declared_autoreset(env: gym.vector.VectorEnv[Any, Any, Any]) -> AutoresetMode | None:
    """The mode that the environment's metadata names; raises `EnvironmentUnusable` for another value."""
    said = env.metadata.get("autoreset_mode")
    try:
        return None if said is None else AutoresetMode(said)
    except ValueError:
        raise EnvironmentUnusable(
            f"metadata['autoreset_mode'] of {type(env.unwrapped).__name__} is {said!r:.60}; expected "
            f"gymnasium.vector.AutoresetMode.NEXT_STEP, SAME_STEP or DISABLED"
        ) from None


class GymnasiumEnvironments:
    """A vector environment of gymnasium, with the same steps from each of its autoreset modes."""

    def __init__(
        self, env: gym.vector.VectorEnv[Any, Any, Any], description: EnvironmentDescription, *, native: bool,
        parameters: EpisodeParameters | None = None,
    ) -> None:  # fmt: skip
        """Takes over `env`. A native one has a single source of randomness for all copies: it takes one seed."""
        ((self._policy, self._spaces),) = description.policies.items()
        self._env, self._native, self.num_envs = env, native, env.num_envs
        self._parameters = parameters
        self._declared = declared_autoreset(env)
        self.mode = self._declared
        """None where the metadata says nothing, until the first episode ends."""
        self._seeds: Sequence[int] = ()
        self._returns = np.zeros(self.num_envs)
        self._lengths, self._episodes = (np.zeros(self.num_envs, np.int64) for _ in range(2))
        self._everyone = np.ones(self.num_envs, np.bool_)
        self._held, self._idle = False, ~self._everyone
        """`hold`; and which environments only start again in the next step, or wait."""
        leaves = self._spaces.observation.leaves
        self._info_columns = description.info_columns
        self._sums = np.zeros((len(self._info_columns), self.num_envs))
        self._no_slots = np.zeros(0, np.int32)
        self._no_final = {leaf.column("final_obs"): np.zeros((0, *leaf.shape), leaf.column_dtype) for leaf in leaves}

    def reset(self, seeds: Sequence[int], past: RunningEpisodes | None = None) -> dict[str, tuple[Columns, Array]]:
        self._seeds = seeds
        self._episodes[:] = past.episodes if past else 0
        self._lengths[:] = past.lengths if past else 0
        seed = seeds[0] if self._native else self._episode_seeds(range(self.num_envs))
        options = self._drawn(() if past else range(self.num_envs))
        if past:
            taken = self._spaces.action.to_environment
            each = ([pick(taken(its[self._policy]), i) for its in past.done(i)] for i in range(self.num_envs))
            options |= {_PAST: list(each)}
        with NamedFailures("reset"):
            observations, infos = self._env.reset(seed=seed, options=options or None)
        self._idle[:] = False
        self._returns[:] = infos[_RETURN] if past else 0
        self._sums[:] = np.transpose(infos[_SUMS]) if past and self._info_columns else 0
        return {self._policy: (self._spaces.observation.flatten("obs", observations), self._everyone.copy())}

    @property
    def position(self) -> Position | None:
        if self._native:
            return None
        return Position(tuple(self._episodes.tolist()), tuple(self._lengths.tolist()), self._returns)

    def _drawn(self, which: Iterable[int]) -> dict[str, Any]:
        """The option for a reset, where the environments of `which` begin an episode."""
        if self._parameters is None:
            return {}
        for index in which:
            self._parameters.begin(index, episode_seed(self._seeds[index], int(self._episodes[index])))
        each = [dict(drawn.values) for drawn in self._parameters.now]
        return (
            {name: np.array([its[name] for its in each]) for name in each[0]} if self._native else {_PARAMETERS: each}
        )

    def _episode_seeds(self, which: Iterable[int]) -> Any:
        """A seed for each environment of `which`, None for the others."""
        seeds: list[int | None] = [None] * self.num_envs
        for index in which:
            seeds[index] = episode_seed(self._seeds[index], int(self._episodes[index]))
        return seeds

    @NamedFailures("step")
    def step(self, actions: Mapping[str, Columns]) -> Step:
        taken = self._spaces.action.to_environment(actions[self._policy])
        observations, rewards, terminated, truncated, infos = self._env.step(taken)
        mask = self._everyone
        if self._idle.any():
            mask = ~self._idle
            if ((rewards != 0) | terminated | truncated)[self._idle].any():
                raise self._contradiction("it paid or ended an episode in the step after an end")
            rewards, terminated, truncated = np.where(mask, rewards, 0.0), terminated & mask, truncated & mask
        self._returns += rewards
        self._lengths += 1 if mask is self._everyone else mask
        done = terminated | truncated
        if self._native and done.any():
            self._observe_autoreset(infos, done)
        told = self._told(infos, done, mask)
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
        step = PolicyStep(
            self._spaces.observation.flatten("obs", observations),
            np.asarray(rewards, np.float32), terminated, truncated, mask, final, final_slots, told,
            acts=~self._idle if self._held else None,
        )  # fmt: skip
        return Step({self._policy: step}, episodes)

    def _observe_autoreset(self, infos: dict[str, Any], done: Array) -> None:
        """Compares what the environment does at an episode's end with its metadata; raises `EnvironmentFailure`."""
        told = next((name for name in _FINAL_OBS if name in infos), None)
        self.mode = self.mode or (AutoresetMode.SAME_STEP if told else AutoresetMode.NEXT_STEP)
        if self.mode is AutoresetMode.SAME_STEP:
            return
        if told:
            raise self._contradiction(f"info has {told}")
        steps: Any = getattr(self._env.unwrapped, "_elapsed_steps", None)
        if np.shape(steps) == done.shape and not np.asarray(steps)[done].any():
            raise self._contradiction("its _elapsed_steps is 0 where an episode has ended")

    def _contradiction(self, found: str) -> EnvironmentFailure:
        says = f"says {self._declared.name}" if self._declared else "says nothing, which is taken for NEXT_STEP"
        return EnvironmentFailure(
            f"{found}, as if it had reset in the step that ended it, but its metadata['autoreset_mode'] {says}; "
            f"expected {SAME_STEP_EXPECTED}"
        )

    def _told(self, infos: dict[str, Any], done: Array, mask: Array) -> Columns:
        """The configured numbers of this step's infos; of an episode that began again in it, those of its end."""
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
            told = next((infos[name] for name in _FINAL_OBS if name in infos), None)
            last = [None if told is None else pick(told, i) for i in slots.tolist()]
            if any(its is None for its in last):
                raise EnvironmentFailure(
                    "it gave no info['final_obs'] in the step in which an episode ended, though it resets in it "
                    "(SAME_STEP); expected the last observation of each copy that ended: without it, a truncated "
                    "episode would be valued by the first observation of the next; return it, or reset one step later "
                    "(NEXT_STEP)"
                )
            rows = [self._spaces.observation.flatten("final_obs", its) for its in last]
            return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        flat = self._spaces.observation.flatten("final_obs", observations)
        return {name: array[slots] for name, array in flat.items()}

    def _records(self, ended: Array, infos: dict[str, Any]) -> list[tuple[int, EpisodeRecord]]:
        """Of the environments in which an episode has ended; a thousand copies end some in nearly every step."""
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
            records.append((index, record if self._parameters is None else self._parameters.noted(index, record)))
        return records

    @NamedFailures("set_phase")
    def set_phase(self, phase: Phase) -> None:
        self._tell("set_phase", str(phase))

    @NamedFailures("set_paused")
    def set_paused(self, paused: bool) -> bool:
        return self._tell("set_paused", paused)

    @NamedFailures("hold")
    def hold(self, held: bool) -> None:
        self._held, self._idle = held, ~self._everyone
        made: Any = self._env
        made.call("hold", held)

    def _tell(self, name: str, value: Any) -> bool:
        if self._native:
            return vector_env.tell(self._env, name, value)
        made: Any = self._env  # sync or async: both have it
        return any(made.call("tell", name, value))

    def close(self) -> None:
        close_vector(self._env)


def close_vector(env: gym.vector.VectorEnv[Any, Any, Any]) -> None:
    """Ends the environments and their processes, if they have any."""
    try:
        env.close(**({"timeout": _ANSWERS_WITHIN} if isinstance(env, gym.vector.AsyncVectorEnv) else {}))
    except Exception as error:  # such as a process of theirs that has died
        _LOGGER.warning("closing the environments failed: %s: %s", type(error).__name__, error)
        for process in getattr(env, "processes", ()):
            process.kill()
            process.join()
        env.closed = True


def _number_of_each(infos: Mapping[str, Any], name: str, mask: Array) -> Array:
    """`[S]`; an environment of its own vectorization may leave out the mask `_name` where all have the number."""
    return vector_env.usable(infos.get(name), mask & infos.get(f"_{name}", True))


class GuardedEnvironment(gym.Wrapper[Any, Any, Any, Any]):
    """Turns what an environment raises into `EnvironmentFailure`, with its number, the place and the traceback.

    Of its infos only the numbers of an episode's last pass, and the configured ones of each: what is odd in them (an
    object that cannot be pickled, an integer of 400 digits, text beside numbers) would end gymnasium's vectorization.
    With the option `_PAST` (a list of actions for each environment) a reset also does these actions, and with
    `_PARAMETERS` it gives the environment its own of them.
    """

    def __init__(
        self, env: gym.Env[Any, Any], index: int, info_columns: Sequence[str] = (),
        parameterized: Parameterized | None = None,
    ) -> None:  # fmt: skip
        super().__init__(env)
        self._parameterized = parameterized
        self._index, self._info_columns = index, info_columns
        self._held = False
        self._waiting: Any = None
        """While it waits: what it observed last."""
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
                sums += np.nan_to_num(vector_env.of_info(info, self._info_columns))
                if terminated or truncated:
                    break  # it is not the episode that it was: the successor compares, and will see
            self._waiting = observation if self._held else None
            return observation, {_RETURN: total, _SUMS: sums} if past else {}

    def hold(self, held: bool) -> None:
        """Whether it waits after its next reset, and until when: steps then change nothing."""
        self._held, self._waiting = held, None

    def tell(self, name: str, value: Any) -> bool:
        if self._parameterized is not None:
            return self._parameterized.tell(self.env, name, value)
        return vector_env.tell(self.env, name, value)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self._waiting is not None:
            return self._waiting, 0.0, False, False, {}
        with self._stepping:
            observation, reward, terminated, truncated, info = self.env.step(action)
            if isinstance(reward, np.ndarray):
                reward = reward.item()  # of one element, as some environments give it; raises for more
            if terminated or truncated:
                return observation, reward, terminated, truncated, vector_env.numbers(info)
            told = {name: info[name] for name in self._info_columns if name in info}
            return observation, reward, terminated, truncated, vector_env.numbers(told)
