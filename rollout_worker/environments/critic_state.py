"""What critics see of the whole environment (`policies.<id>.critic_observes: state`): PettingZoo's `state()`, or what
all agents observe where the environment has none."""

from collections.abc import Iterable, Mapping, Set
from typing import Any

from gymnasium import spaces


def _tells(env: Any) -> bool:
    return isinstance(getattr(env, "state_space", None), spaces.Space)


def state_space(env: Any, observed: Mapping[str, spaces.Space[Any]]) -> spaces.Dict:
    """From what each agent observes."""
    seen = env.state_space if _tells(env) else spaces.Dict(dict(observed))
    return spaces.Dict({"agent": spaces.Discrete(len(observed)), "seen": seen})


def with_state(
    env: Any, observations: Mapping[str, Any], absent: Mapping[str, Any], who: Iterable[str], live: Set[str],
    cut: Set[str],
) -> Any:  # fmt: skip
    """Observations of all agents there are; those of `who` as pairs of their own and the state.

    Without a state of the environment's own, it has what the `live` observe, who act next, and beside the last
    observation of an agent also what those observe that are `cut`, truncated by this step; for others `absent`, what
    an agent that is not there is taken to observe.
    """
    told = {agent: observation for agent, observation in observations.items() if observation is not None}
    now: Any
    last: Any
    if _tells(env):
        now = last = env.state()
    else:
        now = {agent: told[agent] if agent in live else absent[agent] for agent in absent}
        last = now | {agent: told[agent] for agent in cut & told.keys()}
    states = {
        agent: {"agent": number, "seen": now if agent in live else last}
        for number, agent in enumerate(absent)
        if agent in told
    }
    return {**observations, **{agent: (observations[agent], states[agent]) for agent in who if agent in states}}
