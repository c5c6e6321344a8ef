"""State of the whole environment for critics (`policies.<id>.critic_observes: state`): PettingZoo's `state()`, or the
observations of all agents if the environment has none."""

from collections.abc import Iterable, Mapping, Set
from typing import Any

from gymnasium import spaces


def _has_state(env: Any) -> bool:
    return isinstance(getattr(env, "state_space", None), spaces.Space)


def state_space(env: Any, observed: Mapping[str, spaces.Space[Any]]) -> spaces.Dict:
    """Returns the space of the state; `observed` are the spaces of the agents' observations."""
    seen = env.state_space if _has_state(env) else spaces.Dict(dict(observed))
    return spaces.Dict({"agent": spaces.Discrete(len(observed)), "seen": seen})


def with_state(
    env: Any, observations: Mapping[str, Any], absent: Mapping[str, Any], who: Iterable[str], live: Set[str],
    cut: Set[str],
) -> Any:  # fmt: skip
    """Returns the observations of all present agents, for the agents `who` as pairs of their own and the state.

    An environment without `state()` gets one of the observations of the `live` agents, which act next; the state of a
    last observation also has those of the agents that are `cut` (truncated by this step). Other agents count with
    their observation in `absent`.
    """
    present = {agent: observation for agent, observation in observations.items() if observation is not None}
    now: Any
    last: Any
    if _has_state(env):
        now = last = env.state()
    else:
        now = {agent: present[agent] if agent in live else absent[agent] for agent in absent}
        last = now | {agent: present[agent] for agent in cut & present.keys()}
    states = {
        agent: {"agent": number, "seen": now if agent in live else last}
        for number, agent in enumerate(absent)
        if agent in present
    }
    return {**observations, **{agent: (observations[agent], states[agent]) for agent in who if agent in states}}
