"""When an episode of several agents is over: `environment.episode_ends: any`."""

from collections.abc import Mapping
from typing import Any


class FirstDone:
    """A PettingZoo parallel environment whose episode ends with the first agent that is done: for all others it is
    truncated there."""

    def __init__(self, env: Any) -> None:
        self.env, self._over = env, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    @property
    def agents(self) -> list[str]:
        """Nobody, once the episode is over."""
        return [] if self._over else list(self.env.agents)

    def reset(self, *arguments: Any, **options: Any) -> Any:
        self._over = False
        return self.env.reset(*arguments, **options)

    def step(self, actions: Mapping[str, Any]) -> tuple[Any, ...]:
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        self._over = any(terminated.get(agent) or truncated.get(agent) for agent in actions)
        if self._over:
            truncated = {agent: not terminated.get(agent) or truncated.get(agent, False) for agent in actions}
        return observations, rewards, terminated, truncated, infos
