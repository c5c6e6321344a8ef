"""State of a native environment, where it is plain data: a worker's successor resumes it exactly."""

import json
from typing import Any

import gymnasium as gym
import numpy as np

from stagecoach.shared.experience.spaces import Array, Columns

_CONSTANT = ("metadata", "spec")
"""Attributes that Gymnasium defines and no step changes."""
_SPACES = (gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary)
_VALUES = "values"
"""Name of the numbers and generators, as JSON in bytes; an array is `array.ATTRIBUTE`."""


def plain_state(env: gym.vector.VectorEnv[Any, Any, Any]) -> Columns | None:
    """Returns arrays from which `restore` sets an equal environment to this state.

    Returns None if they may be incomplete: a wrapper, a view of another array, or any attribute but numbers, text,
    arrays, simple spaces and NumPy's generators.
    """
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
    if fresh is None or {name: _kind(array) for name, array in fresh.items() if name != _VALUES} != {
        name: _kind(array) for name, array in state.items() if name != _VALUES
    }:
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


def _kind(array: Array) -> tuple[tuple[int, ...], np.dtype[Any]]:
    return array.shape, array.dtype


def _generator(value: Any) -> np.random.Generator | None:
    if type(value) in _SPACES:
        value = value._np_random
    return value if isinstance(value, np.random.Generator) else None
