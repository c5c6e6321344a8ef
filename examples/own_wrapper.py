"""A wrapper of your own, sticky actions: `environment: {wrappers: [{path: "own_wrapper:StickyActions"}]}`."""

from typing import Any

import gymnasium as gym


class StickyActions(gym.Wrapper[Any, Any, Any, Any]):
    """Repeats the last action with some probability (Machado et al. 2018), and counts how often it did."""

    def __init__(self, env: gym.Env[Any, Any], probability: float = 0.25) -> None:
        super().__init__(env)
        self.probability, self.last, self.repeated = probability, None, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.last, self.repeated = None, 0  # all that it remembers of an episode begins with the episode
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self.last is not None and self.np_random.random() < self.probability:  # the environment's own generator
            action, self.repeated = self.last, self.repeated + 1
        self.last = action
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated, truncated, info | {"repeated": self.repeated}
