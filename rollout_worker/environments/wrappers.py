"""Environment wrappers that Gymnasium lacks, for `environment.wrappers`.

A config names one as `stagecoach.rollout_worker.environments.wrappers:CropObservation`.
"""

from collections.abc import Sequence
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np

from stagecoach.shared.base.errors import EnvironmentUnusable


class CropObservation(gym.ObservationWrapper[Any, Any, Any]):
    """Crops an image observation (H×W or H×W×C) to `height` × `width` pixels from row `top`, column `left` on."""

    def __init__(self, env: gym.Env[Any, Any], top: int, left: int, height: int, width: int) -> None:
        super().__init__(env)
        space = env.observation_space
        shape = space.shape if isinstance(space, gym.spaces.Box) else None
        if shape is None or len(shape) not in (2, 3):
            raise EnvironmentUnusable(f"CropObservation needs an image (H×W or H×W×C), found {space}")
        if min(top, left) < 0 or min(height, width) < 1 or top + height > shape[0] or left + width > shape[1]:
            part, whole = f"{height}×{width} pixels from ({top}, {left})", f"{shape[0]}×{shape[1]}"
            raise EnvironmentUnusable(f"CropObservation: {part} do not lie in an image of {whole}")
        self._part = (slice(top, top + height), slice(left, left + width))
        assert isinstance(space, gym.spaces.Box)
        dtype: Any = space.dtype
        self.observation_space = gym.spaces.Box(space.low[self._part], space.high[self._part], dtype=dtype)

    def observation(self, observation: Any) -> Any:
        return np.ascontiguousarray(observation[self._part])


class ClipObservation(gym.ObservationWrapper[Any, Any, Any]):
    """Clips observations of a Box to `low` … `high`: a number for all elements, or one for each."""

    def __init__(self, env: gym.Env[Any, Any], low: float | Sequence[float], high: float | Sequence[float]) -> None:
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, gym.spaces.Box):
            raise EnvironmentUnusable(f"ClipObservation needs a Box, found {space}")
        dtype: Any = space.dtype
        self._bounds = np.asarray(low, dtype), np.asarray(high, dtype)
        if not (self._bounds[0] <= self._bounds[1]).all():
            raise EnvironmentUnusable(f"ClipObservation: low={low} is above high={high}")
        lowest, highest = (np.clip(side, *self._bounds) for side in (space.low, space.high))
        self.observation_space = gym.spaces.Box(lowest, highest, dtype=dtype)

    def observation(self, observation: Any) -> Any:
        return np.clip(observation, *self._bounds)


class MapAction(gym.ActionWrapper[Any, Any, Any]):
    """Maps discrete actions 0, 1, … to these actions of the environment: some of them, or another order.

    They may be of any space: numbers, or lists for a Box or MultiDiscrete.
    """

    def __init__(self, env: gym.Env[Any, Any], actions: Sequence[Any]) -> None:
        super().__init__(env)
        inner, dtype = env.action_space, getattr(env.action_space, "dtype", None)
        made = [action if isinstance(action, int) else np.asarray(action, dtype) for action in actions]
        odd = [action for action, item in zip(actions, made, strict=True) if not inner.contains(item)]
        if odd or not made:
            raise EnvironmentUnusable(f"MapAction: actions={list(actions)}, expected actions of {inner}; not so: {odd}")
        self._actions = made
        self.action_space = gym.spaces.Discrete(len(made))

    def action(self, action: Any) -> Any:
        return self._actions[int(action)]


def _lives(info: dict[str, Any], wrapper: str) -> int:
    if "lives" not in info:
        raise EnvironmentUnusable(f"{wrapper} reads info['lives'], as ALE's games report it; info has {sorted(info)}")
    return int(info["lives"])


class EpisodicLife(gym.Wrapper[Any, Any, Any, Any]):
    """Ends the episode (terminated), but not the game, with a lost life: the next episode continues the game.

    For training in games with several lives (Mnih et al. 2015). A new game begins only when the last one is over, so
    that late parts of a game are visited too. An evaluation scores whole games: leave the wrapper out of
    `evaluation.wrappers`. Requires `info["lives"]`, as ALE has it; action 0 has to do nothing.

    Later episodes of a game do not follow from their seed and actions alone, so a worker that is restarted in one of
    them begins new games.
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self._left, self._lost = 0, False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if self._lost:
            observation, _, terminated, truncated, info = self.env.step(0)
        if not self._lost or terminated or truncated:
            observation, info = self.env.reset(seed=seed, options=options)
        self._left, self._lost = _lives(info, "EpisodicLife"), False
        return observation, info

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        left = _lives(info, "EpisodicLife")
        # some games show no lives for some frames before they are over
        self._lost = 0 < left < self._left and not terminated and not truncated
        self._left = left
        return observation, reward, terminated or self._lost, truncated, info


class FireReset(gym.Wrapper[Any, Any, Any, Any]):
    """Presses FIRE when a life begins, for games that stand still until then (Breakout): after each reset, and after a
    life that was lost within the episode, so that whole games can be evaluated too.

    A reward of FIRE after a lost life is part of that step's reward. Requires that action 1 is FIRE, as in ALE.
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        actions = list(getattr(env.unwrapped, "get_action_meanings", list)())
        if actions[1:2] != ["FIRE"]:
            raise EnvironmentUnusable(f"FireReset: action 1 has to be FIRE, found {actions}; leave it out")
        self._left = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.env.reset(seed=seed, options=options)
        observation, _, terminated, truncated, info = self.env.step(1)
        if terminated or truncated:
            observation, info = self.env.reset(seed=seed, options=options)
        self._left = _lives(info, "FireReset")
        return observation, info

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        if _lives(info, "FireReset") < self._left and not terminated and not truncated:
            observation, more, terminated, truncated, info = self.env.step(1)
            reward = float(reward) + float(more)
        self._left = _lives(info, "FireReset")
        return observation, reward, terminated, truncated, info
