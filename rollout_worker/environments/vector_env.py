"""What the sampler steps: the interface of all vectorized environments, and what their steps and episodes are.

Every step hands over the true last observation of what ended, and has already reset it. `mask` is false where there was
nothing to act for (an absent agent; the extra step in which a native vector environment resets itself).
"""

import traceback
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ContextDecorator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from stagecoach.shared.base.errors import EnvironmentFailure
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.experience.fragment import LARGEST, LARGEST_SHOWN, EpisodeRecord
from stagecoach.shared.experience.spaces import Array, Columns, EnvironmentDescription, Leaf

SUCCESS = ("is_success", "success")
"""How environments name the success of an episode in `info`."""
OUTCOME = "outcome"
"""How they name an agent's share in a match's end in `info`, from 0 to 1."""
GREEDILY = 2
"""In `PolicyStep.acts`: it is to act, and by the best action."""


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
    info: Columns = field(default_factory=dict)
    """`info/NAME` `[S]`, float32: NaN where the environment did not tell, or what it told cannot be learned from."""
    acts: Array | None = None
    """`[S]`: who is to act next, and perhaps `GREEDILY`; None: everyone."""
    in_turns: bool = False
    """Whether agents act in turns: `mask` is then true where the outcome of an earlier turn is known now."""

    @property
    def over(self) -> Array:
        """Where a hidden state begins anew: an episode has ended, or there was nothing to act for."""
        ended: Array = self.terminated | self.truncated
        return ended if self.in_turns else ended | ~self.mask


@dataclass
class Step:
    policies: dict[str, PolicyStep]
    episodes: list[tuple[int, EpisodeRecord]] = field(default_factory=list)
    """Environment number and record of each episode that ended."""


class Position(NamedTuple):
    """Where the environments stand: the numbers of their running episodes, and the steps in them so far."""

    episodes: tuple[int, ...]
    lengths: tuple[int, ...]
    returns: Array
    """Float64; the sum of rewards so far, per environment (and agent)."""


@dataclass(frozen=True)
class RunningEpisodes:
    """Where each environment stands: the number of its episode, the steps in it so far, and what was done in them."""

    episodes: tuple[int, ...]
    lengths: tuple[int, ...]
    actions: Mapping[str, Columns]
    """Policy id → columns `[L, S, …]` of the last steps; at least as many as the longest of these episodes has."""

    @property
    def steps(self) -> int:
        """L."""
        return len(next(iter(next(iter(self.actions.values())).values())))

    def done(self, environment: int) -> Iterator[dict[str, Columns]]:
        """The actions `[S, …]` of all slots, per policy id, in each step of an environment's running episode."""
        for row in range(self.steps - self.lengths[environment], self.steps):
            yield {id_: {name: array[row] for name, array in its.items()} for id_, its in self.actions.items()}


class VectorEnvironment(Protocol):
    num_envs: int

    def reset(self, seeds: Sequence[int], past: RunningEpisodes | None = None) -> dict[str, tuple[Columns, Array]]:
        """Starts all environments; per policy id the first observations and the mask.

        The seeds are those of the first episodes; later ones follow from them (`episode_seed`). With `past` each
        environment takes up its episode, by doing its actions again.
        """

    @property
    def position(self) -> Position | None:
        """Where the environments stand; None where they cannot be brought there again (native ones)."""

    def step(self, actions: Mapping[str, Columns]) -> Step:
        """Takes the actions of all slots, per policy id; raises `EnvironmentFailure`."""

    def set_phase(self, phase: Phase) -> None:
        """Calls `set_phase("heatup" | "train" | "test")` of each environment and wrapper that has such a method."""

    def set_paused(self, paused: bool) -> bool:
        """Calls `set_paused(paused)` of each environment and wrapper that has such a method; whether any has."""

    def close(self) -> None:
        """Ends the environments."""


class HoldableEnvironment(VectorEnvironment, Protocol):
    """One for `rollout.complete_episodes`."""

    def hold(self, held: bool) -> None:
        """While `held`, an environment whose episode has ended waits at the start of the next: its `PolicyStep.acts`
        and `mask` are false."""


class NamedFailures(ContextDecorator):
    """A context (or decorator) that turns what is raised in it into `EnvironmentFailure`."""

    def __init__(self, place: str, index: int | None = None) -> None:
        self._place, self._which = place, "the vectorized environment" if index is None else f"environment {index}"

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (Exception, SystemExit)) and not isinstance(error, EnvironmentFailure):
            raised = f"{self._which} raised {type(error).__name__} in {self._place}: {' '.join(str(error).split())}"
            raise EnvironmentFailure(f"{raised}\n{''.join(traceback.format_exception(error))}") from None


def reject_unusable(columns: Mapping[str, Columns], description: EnvironmentDescription) -> None:
    """Raises `EnvironmentFailure` where observations or rewards (policy id → columns) cannot be learned from."""
    for policy_id, its in columns.items():
        spaces = description.policies[policy_id]
        leaves, masks = spaces.observation.leaves, spaces.observation.mask_columns
        observed = {leaf.column(prefix): leaf for prefix in ("obs", "bootstrap_obs", "final_obs") for leaf in leaves}
        if masks and "mask" in its and (stuck := spaces.without_legal({n: its[n][its["mask"]] for n in masks})).any():
            raise EnvironmentFailure(
                f"the environment told policy {policy_id} an action_mask without a legal action in {stuck.sum()} of "
                f"{len(stuck)} steps that were acted; expected one for each choice; mark it, or end the episode"
            )
        for name, array in its.items():
            leaf = observed.get(name)
            if (leaf or name == "reward") and (expected := _unusable(array, leaf)):
                what = f"an observation ({policy_id}/{name})" if leaf else f"a reward for policy {policy_id}"
                raise EnvironmentFailure(f"the environment returned {what} that cannot be learned from: {expected}")


def reject_unusable_now(
    now: Mapping[str, Columns], acts: Mapping[str, Array], description: EnvironmentDescription
) -> None:
    """The same of what all slots observe now, `acts` `[S]` being who is to act: also where no fragment will hold it."""
    reject_unusable({policy_id: its | {"mask": acts[policy_id] > 0} for policy_id, its in now.items()}, description)


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
    return EpisodeRecord(episode_return, length, bool(found[0]) if found else None, agent_returns or {}, metrics)


def scalar(name: str, value: Any) -> dict[str, float]:
    """`{name: float}` for a number that a fragment may hold (finite, of a bounded magnitude), else nothing."""
    if isinstance(value, bool | int | float | np.bool_ | np.number) and -LARGEST_SHOWN <= value <= LARGEST_SHOWN:
        return {name: float(value)}
    return {}


def numbers(info: Mapping[Any, Any]) -> dict[str, float]:
    return {key: number for name, value in info.items() for key, number in scalar(str(name), value).items()}


def usable(values: Any, told: Array) -> Array:
    """`[S]` float32 for a column `info/NAME`: NaN where nothing is `told`, and for what a fragment cannot hold."""
    try:
        found = np.asarray(values, np.float64)
    except (TypeError, ValueError, OverflowError):
        found = np.zeros(0)
    if found.shape != told.shape:
        return np.full(told.shape, np.nan, np.float32)
    with np.errstate(invalid="ignore"):
        return np.where(told & (np.abs(found) <= LARGEST), found, np.nan).astype(np.float32)


def of_info(info: Mapping[Any, Any], names: Sequence[str]) -> Array:
    """`[C]` float32: the numbers of these names, NaN as in a column `info/NAME`."""
    found = [scalar(name, info.get(name)).get(name, np.nan) for name in names]
    return usable(found, np.ones(len(names), np.bool_))


def tell(env: Any, name: str, value: Any) -> bool:
    """Calls a method of an environment and all its wrappers that have it, outermost first; returns whether any has."""
    found = False
    for layer in layers(env):
        if callable(method := getattr(type(layer), name, None)):
            method(layer, value)
            found = True
    return found


def layers(env: Any) -> Iterator[Any]:
    """An environment's wrappers, outermost first, and then itself."""
    while env is not None:
        yield env
        env = getattr(env, "env", None)


def holder(env: Any, names: Set[str]) -> Any:
    """The outermost of its layers with one of these attributes of its own, not handed on; None where none has."""
    return next((its for its in layers(env) if names & {*dir(type(its)), *getattr(its, "__dict__", ())}), None)


def pick(nested: Any, index: int) -> Any:
    """One environment's action out of a nested batch."""
    if isinstance(nested, dict):
        return {key: pick(value, index) for key, value in nested.items()}
    return tuple(pick(value, index) for value in nested) if isinstance(nested, tuple) else nested[index]
