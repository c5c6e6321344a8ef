"""State of a native environment: complete where it is plain data, else refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from stagecoach.rollout_worker.environments.gymnasium_env import plain_state, restore


class Simulated(gym.vector.VectorEnv[Any, Any, Any]):
    """Numbers, arrays, a space that is sampled, and a generator."""

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}

    def __init__(self, length: int = 3) -> None:
        self.num_envs, self.length, self.mode, self.time = 2, length, "slow", 0.1
        self.single_observation_space: Any = gym.spaces.Box(-1, 1, (3,))
        self.places = np.zeros((2, 3), np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.single_observation_space.seed(seed)
        self.places = np.zeros((2, 3), np.float32)
        return self.places, {}

    def step(self, actions: Any) -> Any:
        self.time, self.mode = self.time * 1.1, "fast"
        self.places += self.single_observation_space.sample() + self.np_random.normal(size=(2, 3))
        return self.places.copy()


class Slotted(Simulated):
    """State in a slot, where `vars` does not show it."""

    __slots__ = ("hidden",)


def set_attribute(name: str, value: Callable[[Simulated], Any]) -> Callable[[Simulated], Any]:
    def change(env: Simulated) -> Simulated:
        setattr(env, name, value(env))
        return env

    return change


def test_restored_environment_continues_equally() -> None:
    env, successor = Simulated(), Simulated()
    env.reset(seed=1)
    for _ in range(3):
        env.step(None)
    successor.reset(seed=2)
    state = plain_state(env)
    assert state is not None
    restore(successor, {name: array.copy() for name, array in state.items()})
    for _ in range(3):
        assert env.step(None).tobytes() == successor.step(None).tobytes()
    assert vars(successor)["mode"] == "fast" and successor.time == env.time


@pytest.mark.parametrize(
    "change",
    [
        set_attribute("seen", lambda env: [1, 2]),
        set_attribute("seen", lambda env: env.places[0]),
        set_attribute("seen", lambda env: env.places),
        set_attribute("seen", lambda env: np.array([None])),
        set_attribute("seen", lambda env: np.random.Generator(np.random.MT19937(1))),
        set_attribute("seen", lambda env: gym.spaces.Dict({"x": gym.spaces.Discrete(2)})),
        set_attribute("seen", lambda env: lambda: None),
        lambda env: Slotted(),
        lambda env: gym.vector.VectorWrapper(env),
        lambda env: gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")]),
    ],
    ids=["list", "view", "alias", "objects", "MT19937", "nested space", "function", "slots", "wrapper", "sync"],
)
def test_incomplete_state_is_none(change: Callable[[Simulated], Any]) -> None:
    env = Simulated()
    env.reset(seed=1)
    assert plain_state(env) is not None
    assert plain_state(change(env)) is None


def test_restore_refuses_state_of_another_environment() -> None:
    env, other = Simulated(), Simulated()
    env.reset(seed=1)
    other.reset(seed=1)
    state = plain_state(other)
    assert state is not None
    for wrong in ({**state, "array.places": np.zeros((3, 3), np.float32)}, {"values": state["values"]}):
        with pytest.raises(ValueError, match=r"is not one of Simulated"):
            restore(env, wrong)
    env.extra = 1  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"is not one of Simulated"):
        restore(env, state)
