"""Environments of the kit's own."""

from __future__ import annotations

from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np

_KEPT = 1000


class ShuffledRewards(gym.Wrapper[Any, Any, Any, Any]):
    """Gives each step the reward of a step that was drawn from the last thousand: none says what an action was worth.

    That takes a task whose episodes all have the same length, else the number of steps would still say something.
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self._seen: list[float] = []
        self._at = 0
        self._draw = np.random.default_rng(0)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self._draw = np.random.default_rng(seed)
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        if len(self._seen) < _KEPT:
            self._seen.append(float(reward))
        else:
            self._seen[self._at % _KEPT] = float(reward)
        self._at += 1
        return observation, self._seen[self._draw.integers(len(self._seen))], terminated, truncated, info


def minatar(game: str) -> gym.Env[Any, Any]:
    """A game of MinAtar (Young and Tian 2019) as bytes, with the actions that it has a use for; 5000 steps at most."""
    from minatar.gym import BaseEnv

    env: gym.Env[Any, Any] = BaseEnv(game=game, use_minimal_action_set=True)
    space = gym.spaces.Box(0, 255, env.observation_space.shape, np.uint8)
    seen = gym.wrappers.TransformObservation(env, lambda observation: observation.astype(np.uint8) * 255, space)
    return gym.wrappers.TimeLimit(seen, 5000)


def minigrid(id: str) -> gym.Env[Any, Any]:
    """A maze of MiniGrid (Chevalier-Boisvert et al. 2023) as 7 × 7 cells in sight, three numbers each, one-hot; with
    the actions that move."""
    from minigrid.wrappers import ImgObsWrapper

    counts = (11, 6, 4)  # objects, colors and states that there are
    env: gym.Env[Any, Any] = ImgObsWrapper(gym.make(id))
    space = gym.spaces.Box(0, 1, (7 * 7 * sum(counts),), np.float32)

    def seen(cells: Any) -> Any:
        return np.concatenate(
            [np.eye(count)[cells[..., i]].ravel() for i, count in enumerate(counts)], dtype=np.float32
        )

    moving = gym.wrappers.TransformAction(env, lambda action: action, gym.spaces.Discrete(3))
    return gym.wrappers.TransformObservation(moving, seen, space)


def shuffled_rewards(id: str, shuffled: bool = True) -> gym.Env[Any, Any]:
    """A registered environment with its rewards shuffled; without, it is as it is (for the evaluation)."""
    environment = gym.make(id)
    return ShuffledRewards(environment) if shuffled else environment


class HiddenVelocities(gym.ObservationWrapper[Any, Any, Any]):
    """CartPole without its velocities: where cart and pole are, not where they go. Only a memory of the last steps
    tells. A policy without one gets to about 50 of the 500.
    """

    _SEEN = (0, 2)

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        box = env.observation_space
        assert isinstance(box, gym.spaces.Box)
        self.observation_space = gym.spaces.Box(box.low[[*self._SEEN]], box.high[[*self._SEEN]], dtype=np.float32)

    def observation(self, observation: Any) -> Any:
        return observation[[*self._SEEN]]


class BitFlip(gym.Env[dict[str, Any], np.int64]):
    """Flip one of `bits` bits with each step until they are those of the goal (Andrychowicz et al. 2017).

    Each step that does not get there costs 1, so that without hindsight the goal is never seen from 12 bits on. As many
    steps as bits are enough; then it is truncated.
    """

    def __init__(self, bits: int = 12) -> None:
        one = gym.spaces.MultiBinary(bits)
        self.observation_space = gym.spaces.Dict({"observation": one, "achieved_goal": one, "desired_goal": one})
        self.action_space = gym.spaces.Discrete(bits)
        self._bits = self._goal = np.zeros(bits, np.int8)
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self._bits, self._goal = self.np_random.integers(0, 2, (2, len(self._bits)), np.int8)
        if (self._bits == self._goal).all():
            self._goal[self.np_random.integers(len(self._goal))] ^= 1
        self._steps = 0
        return self._observation(), {}

    def step(self, action: np.int64) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self._bits[action] ^= 1
        self._steps += 1
        reached = bool((self._bits == self._goal).all())
        over = self._steps >= len(self._bits)
        return self._observation(), float(reached) - 1, reached, over and not reached, {"is_success": reached}

    def _observation(self) -> dict[str, Any]:
        return {"observation": self._bits.copy(), "achieved_goal": self._bits.copy(), "desired_goal": self._goal.copy()}


class DeepSea(gym.Env[np.int64, np.int64]):
    """A dive through `size` rows, each step one row down and one column to the left or to the right (bsuite, Osband et
    al. 2020). The only reward, 1, is at the bottom on the far right; each step to the right costs 0.01 / `size`.

    Which action goes right differs from cell to cell and is always the same there. One of 2^`size` dives finds the
    reward, and every cost says to stay on the left: who explores by chance alone learns to do that.
    """

    def __init__(self, size: int = 20) -> None:
        self.observation_space = gym.spaces.Discrete(size * size)
        self.action_space = gym.spaces.Discrete(2)
        self._size = size
        self._right = np.random.default_rng(0).integers(0, 2, (size, size))
        self._row = self._column = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.int64, dict[str, Any]]:
        super().reset(seed=seed)
        self._row = self._column = 0
        return self._observation(), {}

    def step(self, action: np.int64) -> tuple[np.int64, float, bool, bool, dict[str, Any]]:
        right = bool(action == self._right[self._row, self._column])
        reward = -0.01 / self._size if right else 0.0
        there = right and self._column == self._size - 1  # only who never went to the left comes to be there
        self._column = min(self._column + 1, self._size - 1) if right else max(self._column - 1, 0)
        self._row += 1
        over = self._row == self._size
        found = over and there
        return self._observation(), reward + float(found), over, False, {"is_success": found}

    def _observation(self) -> np.int64:
        return np.int64(min(self._row, self._size - 1) * self._size + self._column)


class Corridor(gym.Env[Any, Any]):
    """Only the end of a corridor pays. At each place one of two actions, by a code, leads on, and the other ends the
    episode: by chance, `length` 40 is crossed once in 2^40 episodes."""

    reset_options = ("length",)
    LONGEST = 40

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Discrete(self.LONGEST)
        self.action_space = gym.spaces.Discrete(2)
        self._code = np.random.default_rng(0).integers(2, size=self.LONGEST)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.length, self.at = int((options or {}).get("length", 3)), 0
        return self.at, {}

    def step(self, action: Any) -> Any:
        on = bool(action == self._code[self.at])
        self.at += on
        arrived = self.at >= self.length
        return min(self.at, self.LONGEST - 1), float(arrived), arrived or not on, False, {"is_success": arrived}


class Locks(gym.Env[Any, Any]):
    """64 levels, each a lock of six digits over four keys. Each right key pays a sixth, a wrong one ends the episode.

    Three of four locks open to the same code, and look the same; the others have a code each. So most levels are soon
    mastered, all at once, and little is left to be learned in them.
    """

    reset_options = ("level",)
    LEVELS, ALIKE, DIGITS = 64, 48, 6

    def __init__(self) -> None:
        codes = self.LEVELS - self.ALIKE + 1
        self.observation_space = gym.spaces.Discrete(codes * self.DIGITS)
        self.action_space = gym.spaces.Discrete(4)
        self._codes = np.random.default_rng(0).integers(4, size=(codes, self.DIGITS))

    def _seen(self) -> int:
        return self._lock * self.DIGITS + min(self._at, self.DIGITS - 1)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._lock, self._at = max(0, int((options or {}).get("level", 0)) - self.ALIKE + 1), 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        right = bool(action == self._codes[self._lock, self._at])
        self._at += right
        opened = self._at == self.DIGITS
        return self._seen(), right / self.DIGITS, opened or not right, False, {"is_success": opened}
