"""What the sampler steps: the face of all vectorised environments, and what their steps and episodes are.

Every step tells apart `terminated` and `truncated`, hands over the true last observation of what ended, and has already
reset it. `mask` is false where there was nothing to act for (an absent agent; the extra step in which
a native vector environment resets itself).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from rollout_worker.trail import Past
from shared.errors import EnvironmentFailure
from shared.fragment import LARGEST_SHOWN, EpisodeRecord
from shared.spaces import Array, Columns, EnvironmentDescription, Leaf

SUCCESS = ("is_success", "success")
"""How environments name the success of an episode in `info`."""


@dataclass
class PolicyStep:
    """One step of all slots of one policy id."""

    obs: Columns
    """`[S, …]`: what to act on next."""
    reward: Array
    terminated: Array
    truncated: Array
    mask: Array
    final_obs: Columns
    """`[M, …]`: the true last observation of each slot whose episode ended; a terminated one may be missing."""
    final_slots: Array
    """`[M]`, int32."""

    @property
    def over(self) -> Array:
        """Where a policy begins to remember anew: an episode has ended, or there was nothing to act for."""
        over: Array = self.terminated | self.truncated | ~self.mask
        return over


@dataclass
class Step:
    """One step of all environments."""

    policies: dict[str, PolicyStep]
    episodes: list[tuple[int, EpisodeRecord]] = field(default_factory=list)
    """Environment number and record of each episode that ended."""


class Place(NamedTuple):
    """Where the environments stand."""

    episodes: tuple[int, ...]
    """Numbers of their running episodes."""
    lengths: tuple[int, ...]
    """Steps in them so far."""
    returns: Array
    """Float64; the sum of rewards so far, per environment (and agent)."""


class VectorEnvironment(Protocol):
    """What the sampler steps."""

    num_envs: int

    def reset(self, seeds: Sequence[int], past: Past | None = None) -> dict[str, tuple[Columns, Array]]:
        """Starts all environments; per policy id the first observations and the mask.

        The seeds are those of the first episodes, later ones follow from them (`trail.episode_seed`). With `past` each
        environment takes up its episode, by doing its actions again.
        """
        ...

    @property
    def place(self) -> Place | None:
        """Where the environments stand; None where they cannot be brought there again (native ones)."""
        ...

    def step(self, actions: Mapping[str, Columns]) -> Step:
        """Takes the actions of all slots, per policy id; raises `EnvironmentFailure`."""
        ...

    def close(self) -> None:
        """Ends the environments."""
        ...


def refuse_unusable(columns: Mapping[str, Columns], description: EnvironmentDescription) -> None:
    """Raises `EnvironmentFailure` where observations or rewards (policy id → columns) cannot be learned from."""
    for policy_id, its in columns.items():
        leaves = description.policies[policy_id].observation.leaves
        observed = {leaf.column(prefix): leaf for prefix in ("obs", "bootstrap_obs", "final_obs") for leaf in leaves}
        for name, array in its.items():
            expected = _unusable(array, observed.get(name)) if name == "reward" or name in observed else None
            if expected is not None:
                what = (
                    f"a reward for policy {policy_id}" if name == "reward" else f"an observation ({policy_id}/{name})"
                )
                raise EnvironmentFailure(f"the environment returned {what} that cannot be learned from: {expected}")


def _unusable(array: Array, leaf: Leaf | None) -> str | None:
    """What is found in a column and was expected there; None where nothing is wrong."""
    if array.dtype.kind == "f":
        with np.errstate(all="ignore"):
            if np.isfinite(array.sum()) or np.isfinite(array).all():  # a sum costs less, and may overflow
                return None
        return "it holds NaN (or None) or infinity, expected finite numbers; look for a division by zero"
    if leaf is None or leaf.kind == "box" or not array.size:
        return None
    most = np.asarray(leaf.nvec).reshape(leaf.shape)
    if (array >= 0).all() and (array < most).all():
        return None
    first = min(leaf.start)
    found = f"{array.min() + first} to {array.max() + first}"
    return f"it holds choices from {found}, expected {first} to {int(most.max()) - 1 + first}; correct the space"


def episode_record(
    episode_return: float, length: int, metrics: dict[str, float], agent_returns: dict[str, float] | None = None
) -> EpisodeRecord:
    """A record, with `is_success` or `success` taken out of the metrics."""
    found = [metrics.pop(name) for name in SUCCESS if name in metrics] if metrics else ()
    success = found[0] if found else None
    return EpisodeRecord(
        episode_return, length, None if success is None else bool(success), agent_returns or {}, metrics
    )


def scalar(name: str, value: Any) -> dict[str, float]:
    """`{name: float}` for a number that a fragment may hold (finite, of a bounded magnitude), else nothing."""
    if isinstance(value, bool | int | float | np.bool_ | np.number) and -LARGEST_SHOWN <= value <= LARGEST_SHOWN:
        return {name: float(value)}
    return {}


def numbers(info: Mapping[Any, Any]) -> dict[str, float]:
    """What `scalar` finds in an info."""
    return {key: number for name, value in info.items() for key, number in scalar(str(name), value).items()}


def pick(nested: Any, index: int) -> Any:
    """One environment's action out of a nested batch."""
    if isinstance(nested, dict):
        return {key: pick(value, index) for key, value in nested.items()}
    if isinstance(nested, tuple):
        return tuple(pick(value, index) for value in nested)
    return nested[index]
