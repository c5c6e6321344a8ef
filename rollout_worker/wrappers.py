"""Environment wrappers that gymnasium lacks, for `environment.wrappers`: `rollout_worker.wrappers:CropObservation` …"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from shared.errors import EnvironmentUnusable


class CropObservation(gym.ObservationWrapper[Any, Any, Any]):
    """A part of an image observation (H×W or H×W×C): `height` × `width` pixels from row `top`, column `left` on."""

    def __init__(self, env: gym.Env[Any, Any], top: int, left: int, height: int, width: int) -> None:
        super().__init__(env)
        space = env.observation_space
        shape = space.shape if isinstance(space, gym.spaces.Box) else None
        if shape is None or len(shape) not in (2, 3):
            raise EnvironmentUnusable(f"CropObservation needs an image (H×W or H×W×C), found {space}")
        if min(top, left) < 0 or min(height, width) < 1 or top + height > shape[0] or left + width > shape[1]:
            raise EnvironmentUnusable(
                f"CropObservation: {height}×{width} pixels from ({top}, {left}) do not lie in an image of "
                f"{shape[0]}×{shape[1]}"
            )
        self._part = (slice(top, top + height), slice(left, left + width))
        assert isinstance(space, gym.spaces.Box)
        dtype: Any = space.dtype
        self.observation_space = gym.spaces.Box(space.low[self._part], space.high[self._part], dtype=dtype)

    def observation(self, observation: Any) -> Any:
        return np.ascontiguousarray(observation[self._part])


class ClipObservation(gym.ObservationWrapper[Any, Any, Any]):
    """Observations of a Box, bounded to `low` … `high`: a number for all elements, or one for each."""

    def __init__(self, env: gym.Env[Any, Any], low: float | Sequence[float], high: float | Sequence[float]) -> None:
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, gym.spaces.Box):
            raise EnvironmentUnusable(f"ClipObservation needs a Box, found {space}")
        dtype: Any = space.dtype
        self._bounds = np.asarray(low, dtype), np.asarray(high, dtype)
        if not (self._bounds[0] <= self._bounds[1]).all():
            raise EnvironmentUnusable(f"ClipObservation: low={low} is above high={high}")
        low_then, high_then = (np.clip(side, *self._bounds) for side in (space.low, space.high))
        self.observation_space = gym.spaces.Box(low_then, high_then, dtype=dtype)

    def observation(self, observation: Any) -> Any:
        return np.clip(observation, *self._bounds)


class MapAction(gym.ActionWrapper[Any, Any, Any]):
    """Discrete actions 0, 1, … stand for these actions of the environment: a choice of some of them, or another order.

    The environment's actions may be of any space that holds them: numbers, or lists for a Box or MultiDiscrete.
    """

    def __init__(self, env: gym.Env[Any, Any], actions: Sequence[Any]) -> None:
        super().__init__(env)
        inner, dtype = env.action_space, getattr(env.action_space, "dtype", None)
        made = [action if isinstance(action, int) else np.asarray(action, dtype) for action in actions]
        odd = [action for action, item in zip(actions, made, strict=True) if not inner.contains(item)]
        if odd or not made:
            raise EnvironmentUnusable(f"MapAction: actions={list(actions)}, expected some of {inner}; not so: {odd}")
        self._actions = made
        self.action_space = gym.spaces.Discrete(len(made))

    def action(self, action: Any) -> Any:
        return self._actions[int(action)]
