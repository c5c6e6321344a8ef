"""Steps an environment's own vectorized version as a run would, and checks that it resets as its metadata says.

A version that silently resets in the step that ends an episode shows nothing wrong: truncated episodes would be valued
by the next one's first observation. It is detected by the effect of the action after an end.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from stagecoach.rollout_worker.environments.checking.report import FATAL, NOTE, Report
from stagecoach.rollout_worker.environments.factory import make_native
from stagecoach.rollout_worker.environments.gymnasium_env import SAME_STEP_EXPECTED, GymnasiumEnvironments
from stagecoach.rollout_worker.environments.parameters import EpisodeParameters
from stagecoach.rollout_worker.environments.seeding import SEEDS
from stagecoach.rollout_worker.environments.vector_env import Step, pick, reject_unusable
from stagecoach.shared.base import world
from stagecoach.shared.base.errors import EnvironmentFailure, headline
from stagecoach.shared.config.environments.environment import EnvironmentConfig
from stagecoach.shared.config.environments.parameters import evaluated_table
from stagecoach.shared.experience.spaces import Array, Columns, EnvironmentDescription

_MOST_STEPS, _MOST_SECONDS = 1100, 5.0
"""Bounds of the wait for an episode's end; enough for the common limit of 1,000 steps."""
_STEPS_AFTER = 10
"""Steps within which an action shows its effect."""


class NativeTrial:
    """Trial of one native version. `act` draws an action for one observation; `again` restarts its draws."""

    def __init__(
        self, report: Report, config: EnvironmentConfig, description: EnvironmentDescription, seed: int,
        act: Callable[[Any], Any], again: Callable[[], None],
    ) -> None:  # fmt: skip
        self._report, self._config, self._description, self._seed = report, config, description, seed
        ((self._policy, self._spaces),) = description.policies.items()
        self._act, self._again = act, again

    def run(self, steps: int) -> None:
        """Steps until an episode has ended, at least `steps` times; raises `Unsteppable` if that is impossible."""
        table = evaluated_table(self._config.parameters, {})
        parameters = None if table is None else EpisodeParameters(table, self._config.num_envs)
        env = self._report.calling("the start of its native version", lambda: make_native(self._config))
        self._env = GymnasiumEnvironments(env, self._description, native=True, parameters=parameters)
        try:
            seen, ended = self._play(steps, None)
            if ended is None:
                found = f"no episode of its native version ended within {len(seen) - 1} steps"
                self._report.add(
                    NOTE, found, "episodes that end", "set environment.max_episode_steps if none ever does"
                )
            elif self._env.mode is AutoresetMode.NEXT_STEP and not self._spaces.observation.mask_columns:
                self._compare(seen, ended)
        except EnvironmentFailure as error:
            self._report.fatal(headline(error), "a vectorized version that a run can learn in", "mend the environment")
        self._report.guarded("close() of its native version", self._env.close)

    def _play(self, steps: int, ended: tuple[int, int] | None) -> tuple[list[Columns], tuple[int, int] | None]:
        """Returns the observations, and the first step and copy in which an episode ended. With `ended` of an earlier
        play, that copy takes another action in the step after it."""
        self._again()
        until = world.monotonic() + _MOST_SECONDS
        other, seeds = ended, [self._seed % SEEDS] * self._env.num_envs
        began = self._report.calling("reset() of its native version", lambda: self._env.reset(seeds))
        seen = [_copied(began[self._policy][0])]
        while len(seen) <= (max(steps, _MOST_STEPS) if ended is None else max(steps, ended[0] + _STEPS_AFTER)):
            if ended is None and len(seen) > steps and world.monotonic() > until:
                break
            actions = self._actions(seen[-1], other[1] if other is not None and len(seen) == other[0] + 1 else None)
            step: Step = self._report.calling("step() of its native version", partial(self._env.step, actions))
            told = step.policies[self._policy]
            reject_unusable({self._policy: {**told.obs, **told.final_obs, "reward": told.reward}}, self._description)
            if ended is None and len(told.final_slots):
                ended = len(seen), int(told.final_slots[0])
            seen.append(_copied(told.obs))
        return seen, ended

    def _actions(self, observed: Columns, other: int | None) -> dict[str, Columns]:
        nested, drawn = self._spaces.observation.nest("obs", observed), []
        for index in range(self._env.num_envs):
            taken = self._spaces.action.flatten("action", self._act(pick(nested, index)))
            if index == other:
                taken = {name: self._another(name, array) for name, array in taken.items()}
            drawn.append(taken)
        return {self._policy: {name: np.stack([its[name] for its in drawn]) for name in drawn[0]}}

    def _another(self, column: str, array: Array) -> Array:
        """Returns a choice or number that differs from what was drawn."""
        leaf = next(leaf for leaf in self._spaces.action.leaves if leaf.column("action") == column)
        if leaf.nvec:
            choice: Array = (array + 1) % np.asarray(leaf.nvec).reshape(leaf.shape)
            return choice
        low, high = (np.nan_to_num(side, neginf=-1.0, posinf=1.0) for side in leaf.bounds())
        another: Array = np.where(array > (low + high) / 2, low, high).astype(array.dtype)
        return another

    def _compare(self, seen: list[Columns], ended: tuple[int, int]) -> None:
        """Plays the same again except for one action in the step that only resets: it should change nothing."""
        (again, _), (step, copy) = self._play(0, ended), ended
        pairs = list(zip(seen, again, strict=False))
        if not all(_same(one, other, copy) for one, other in pairs[: step + 1]):
            return  # it does not follow its seed, so this shows nothing
        if not all(_same(one, other, copy) for one, other in pairs[step + 1 :]):
            found = "in the step after an episode's end its action had an effect, as if the end's step had reset it"
            remedy = "say in metadata['autoreset_mode'] what it does; nothing is taken for NEXT_STEP"
            self._report.add(FATAL, found, SAME_STEP_EXPECTED, remedy)


def _same(one: Columns, other: Columns, copy: int) -> bool:
    return all(
        np.array_equal(array[copy], other[name][copy], equal_nan=array.dtype.kind == "f") for name, array in one.items()
    )


def _copied(columns: Columns) -> Columns:
    return {name: array.copy() for name, array in columns.items()}
