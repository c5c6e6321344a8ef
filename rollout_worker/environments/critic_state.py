"""What critics see of the whole environment (`policies.<id>.critic_observes: state`): PettingZoo's `state()`, or what
all agents observe where the environment has none."""

from collections.abc import Iterable, Mapping
from typing import Any

from gymnasium import spaces


def _tells(env: Any) -> bool:
    return isinstance(getattr(env, "state_space", None), spaces.Space)


def state_space(env: Any, observed: Mapping[str, spaces.Space[Any]]) -> spaces.Dict:
    """From what each agent observes."""
    seen = env.state_space if _tells(env) else spaces.Dict(dict(observed))
    return spaces.Dict({"agent": spaces.Discrete(len(observed)), "seen": seen})


def with_state(env: Any, observations: Mapping[str, Any], absent: Mapping[str, Any], who: Iterable[str]) -> Any:
    """Observations of all agents there are; those of `who` as pairs of their own and the state. `absent`: what each
    agent that is not there is taken to observe."""
    told = {agent: observation for agent, observation in observations.items() if observation is not None}
    seen = env.state() if _tells(env) else {**absent, **told}
    numbers = {agent: number for number, agent in enumerate(absent) if agent in told}
    states = {agent: {"agent": number, "seen": seen} for agent, number in numbers.items()}
    return {**observations, **{agent: (observations[agent], states[agent]) for agent in who if agent in states}}
