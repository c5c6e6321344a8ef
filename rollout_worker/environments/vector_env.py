"""Interface of vectorized environments, which the sampler steps, and the data of their steps and episodes.

Every step returns the true last observation of each episode that ended, and has already reset it. `mask` is false
where no action was taken (an absent agent; the extra step in which a native vector environment resets itself).
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
"""Names of an episode's success in `info`."""
OUTCOME = "outcome"
"""Name of an agent's result of a match in `info`, from 0 to 1."""
GREEDILY = 2
"""Value in `PolicyStep.acts` of a slot that takes the best action next."""


@dataclass
class PolicyStep:
    """Step of all slots of one policy id."""

    obs: Columns
    """`[S, …]`: observations for the next action."""
    reward: Array
    terminated: Array
    truncated: Array
    mask: Array
    final_obs: Columns
    """`[M, …]`: the true last observation of each slot whose episode ended; that of a terminated one may be missing."""
    final_slots: Array
    """`[M]`, int32."""
    info: Columns = field(default_factory=dict)
    """`info/NAME` `[S]`, float32; NaN for missing or unusable numbers."""
    acts: Array | None = None
    """`[S]`: slots that act next, perhaps `GREEDILY`; None for all."""
    in_turns: bool = False
    """True if agents act in turns: `mask` is then true where the outcome of an earlier turn became known."""
    abandoned: list[int] = field(default_factory=list)
    """Slots whose last turn will never have an outcome, since the episode was given up."""
    begun: list[int] = field(default_factory=list)
    """Slots whose episode begins, perhaps without an end of the one before."""

    @property
    def over(self) -> Array:
        """Slots whose hidden state is reset: the episode has ended, or no action was taken."""
        ended: Array = self.terminated | self.truncated
        ended[self.begun] = True
        return ended if self.in_turns else ended | ~self.mask


@dataclass
class Step:
    policies: dict[str, PolicyStep]
    episodes: list[tuple[int, EpisodeRecord]] = field(default_factory=list)
    """Environment number and record of each episode that ended."""


class Position(NamedTuple):
    """Position of the environments: the numbers of their running episodes, and the steps in them so far."""

    episodes: tuple[int, ...]
    lengths: tuple[int, ...]
    returns: Array
    """Float64; the sum of rewards so far, per environment (and agent)."""
    state: Columns = {}
    """Everything else, for an environment that resumes from it instead of repeating actions."""


@dataclass(frozen=True)
class RunningEpisodes:
    """Running episode of each environment: its number, the steps so far, and the actions."""

    episodes: tuple[int, ...]
    lengths: tuple[int, ...]
    actions: Mapping[str, Columns]
    """Policy id → columns `[L, S, …]` of the last steps; at least as many as the longest of these episodes has."""
    state: Mapping[str, Array] = field(default_factory=dict, kw_only=True)
    """`Position.state`; the lengths are 0 then."""

    @property
    def steps(self) -> int:
        """L."""
        return len(next(iter(next(iter(self.actions.values())).values())))

    def done(self, environment: int) -> Iterator[dict[str, Columns]]:
        """Yields the actions `[S, …]` of all slots, per policy id, for each step of the running episode."""
        for row in range(self.steps - self.lengths[environment], self.steps):
            yield {id_: {name: array[row] for name, array in its.items()} for id_, its in self.actions.items()}


class VectorEnvironment(Protocol):
    num_envs: int

    def reset(self, seeds: Sequence[int], past: RunningEpisodes | None = None) -> dict[str, tuple[Columns, Array]]:
        """Starts all environments by the seeds of their first episodes (see `episode_seed`); returns the first
        observations and the mask per policy id. With `past` each resumes its episode by repeating its actions, or from
        its state."""

    @property
    def position(self) -> Position | None:
        """Position of the environments; None if it cannot be restored (native, with more than plain data)."""

    def step(self, actions: Mapping[str, Columns]) -> Step:
        """Steps with the actions of all slots, per policy id; raises `EnvironmentFailure`."""

    def set_phase(self, phase: Phase) -> None:
        """Calls `set_phase("heatup" | "train" | "test")` of each environment and wrapper that has such a method."""

    def set_paused(self, paused: bool) -> bool:
        """Calls `set_paused(paused)` of each environment and wrapper that has it; returns whether any has."""

    def close(self) -> None:
        """Closes the environments."""


class HoldableEnvironment(VectorEnvironment, Protocol):
    """Vector environment that supports `rollout.complete_episodes`."""

    def hold(self, held: bool) -> None:
        """Makes each environment wait after its episode's end while `held`: its step's `acts` and `mask` are false."""


class NamedFailures(ContextDecorator):
    """Context (or decorator) that turns exceptions into `EnvironmentFailure`."""

    def __init__(self, place: str, index: int | None = None) -> None:
        self._place, self._which = place, "the vectorized environment" if index is None else f"environment {index}"

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (Exception, SystemExit)):
            raise self.failure(error) from None

    def failure(self, error: Exception | SystemExit) -> EnvironmentFailure:
        """Returns the failure to raise for `error`: without the cost of a context, for what runs in every step."""
        if isinstance(error, EnvironmentFailure):
            return error
        raised = f"{self._which} raised {type(error).__name__} in {self._place}: {' '.join(str(error).split())}"
        return EnvironmentFailure(f"{raised}\n{''.join(traceback.format_exception(error))}")


def reject_unusable(columns: Mapping[str, Columns], description: EnvironmentDescription) -> None:
    """Raises `EnvironmentFailure` for unusable observations or rewards (policy id → columns)."""
    for policy_id, its in columns.items():
        spaces = description.policies[policy_id]
        leaves, masks = spaces.observation.leaves, spaces.observation.mask_columns
        observed = {leaf.column(prefix): leaf for prefix in ("obs", "bootstrap_obs", "final_obs") for leaf in leaves}
        if masks and "mask" in its and (stuck := spaces.without_legal({n: its[n][its["mask"]] for n in masks})).any():
            raise EnvironmentFailure(
                f"the environment gave policy {policy_id} an action_mask without a legal action in {stuck.sum()} of "
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
    """Rejects unusable current observations, with `acts` `[S]` as mask: no fragment may ever have them."""
    reject_unusable({policy_id: its | {"mask": acts[policy_id] > 0} for policy_id, its in now.items()}, description)


def _unusable(array: Array, leaf: Leaf | None) -> str | None:
    """Returns what is wrong with a column and what is expected; None if nothing is wrong."""
    if array.dtype.kind == "f":
        with np.errstate(all="ignore"):
            if np.isfinite(array.sum()) or np.isfinite(array).all():  # a sum is cheaper, but may overflow
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
    """Returns the record, with `is_success` or `success` moved out of the metrics."""
    found = [metrics.pop(name) for name in SUCCESS if name in metrics] if metrics else ()
    return EpisodeRecord(episode_return, length, bool(found[0]) if found else None, agent_returns or {}, metrics)


def scalar(name: str, value: Any) -> dict[str, float]:
    """Returns `{name: float}` for a number that a fragment may hold (finite and bounded), else an empty dict."""
    if isinstance(value, bool | int | float | np.bool_ | np.number) and -LARGEST_SHOWN <= value <= LARGEST_SHOWN:
        return {name: float(value)}
    return {}


def numbers(info: Mapping[Any, Any]) -> dict[str, float]:
    return {key: number for name, value in info.items() for key, number in scalar(str(name), value).items()}


def usable(values: Any, given: Array) -> Array:
    """Returns `[S]` float32 for a column `info/NAME`: NaN where not `given`, and for numbers that do not fit."""
    try:
        found = np.asarray(values, np.float64)
    except (TypeError, ValueError, OverflowError):
        found = np.zeros(0)
    if found.shape != given.shape:
        return np.full(given.shape, np.nan, np.float32)
    with np.errstate(invalid="ignore"):
        return np.where(given & (np.abs(found) <= LARGEST), found, np.nan).astype(np.float32)


def info_numbers(info: Mapping[Any, Any], names: Sequence[str]) -> Array:
    """Returns `[C]` float32: the numbers of these names, NaN as in a column `info/NAME`."""
    found = [scalar(name, info.get(name)).get(name, np.nan) for name in names]
    return usable(found, np.ones(len(names), np.bool_))


def call_layers(env: Any, name: str, value: Any) -> bool:
    """Calls a method of an environment and all its wrappers that have it, outermost first; returns whether any has."""
    found = False
    for layer in layers(env):
        if callable(method := getattr(type(layer), name, None)):
            method(layer, value)
            found = True
    return found


def layers(env: Any) -> Iterator[Any]:
    """Yields an environment's wrappers, outermost first, then the environment itself."""
    while env is not None:
        yield env
        env = getattr(env, "env", None)


def holder(env: Any, names: Set[str]) -> Any:
    """Returns the outermost layer that has one of these attributes itself; None without one."""
    return next((its for its in layers(env) if names & {*dir(type(its)), *getattr(its, "__dict__", ())}), None)


def pick(nested: Any, index: int) -> Any:
    """Returns one environment's part of a nested batch."""
    if isinstance(nested, dict):
        return {key: pick(value, index) for key, value in nested.items()}
    return tuple(pick(value, index) for value in nested) if isinstance(nested, tuple) else nested[index]
