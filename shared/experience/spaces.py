"""Spaces as plain data: what an observation or action looks like, and its columns.

A nested gymnasium space becomes a `SpaceSpec`: a list of leaves, each one array, and the structure that nests them.
Trainer, checkpoints and `load_policy` know spaces only so, and need no gymnasium.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, Any, Literal, Self, cast

import numpy as np
import numpy.typing as npt
from pydantic import PlainSerializer, TypeAdapter

Array = npt.NDArray[Any]
Columns = dict[str, Array]
LeafKind = Literal["box", "discrete", "multi_discrete", "multi_binary"]
STATE = "state()"
"""Key of an observation's part for critics (`SpaceSpec.own`); not a key of any environment."""
_Bound = Annotated[float, PlainSerializer(lambda side: side if math.isfinite(side) else str(side))]
_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


class PlainData:
    """A dataclass that travels as JSON."""

    def as_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON; infinite bounds become text."""
        return dict(_adapter(type(self)).dump_python(self, mode="json"))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Inverts `as_dict`; raises `ValueError` for other data."""
        return cast(Self, _adapter(cls).validate_python(data))


@dataclass(frozen=True)
class Leaf:
    """One array of a space, without batch axes."""

    path: str
    """Path in the nested space, joined by dots; empty for a space that is a single leaf."""
    kind: LeafKind
    shape: tuple[int, ...]
    dtype: str
    nvec: tuple[int, ...] = ()
    """Number of choices: one entry for discrete, one per element for multi_discrete and multi_binary (all 2)."""
    start: tuple[int, ...] = ()
    """Smallest choice, one per entry of `nvec`; columns hold choices from 0."""
    low: tuple[_Bound, ...] = ()
    """Box bounds, flattened; a single number stands for all elements."""
    high: tuple[_Bound, ...] = ()
    mask: bool = False
    """Action mask in an observation (shared/policies/masks.py), which no network observes."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_image(self) -> bool:
        """Three axes (or four: stacked frames of color images) of bytes or booleans."""
        return self.kind == "box" and self.dtype in {"uint8", "bool"} and len(self.shape) in {3, 4}

    @property
    def column_dtype(self) -> np.dtype[Any]:
        """Dtype of its column: choices are int64."""
        return np.dtype(np.int64) if self.kind != "box" else np.dtype(self.dtype)

    def bounds(self, dtype: npt.DTypeLike = np.float32) -> tuple[Array, Array]:
        """Box bounds as arrays of `shape`."""
        with np.errstate(over="ignore"):  # the largest float64 is infinite as a float32
            sides = [np.asarray(side, dtype) for side in (self.low, self.high)]
        low, high = (np.broadcast_to(side, (self.size,)).reshape(self.shape).copy() for side in sides)
        return low, high

    def starts(self) -> Array:
        return np.asarray(self.start or (0,) * len(self.nvec), np.int64).reshape(self.shape)

    def own_terms(self, column: Array) -> Array:
        """Returns a column `[…, shape]` in the environment's terms: choices from `start`, in the space's dtype."""
        return (column + self.starts() if any(self.start) else column).astype(self.dtype, copy=False)

    def counted(self, array: npt.ArrayLike) -> Array:
        """Inverts `own_terms`: choices from 0, in the column's dtype."""
        column = np.asarray(array, self.column_dtype)
        return column - self.starts() if any(self.start) else column

    def beyond(self, choices: Array) -> Array:
        """Returns true for each choice, counted from 0, that does not exist."""
        most = self.nvec[0] if len(self.nvec) == 1 else np.reshape(self.nvec, self.shape)
        return (choices < 0) | (choices >= most)

    def column(self, prefix: str) -> str:
        """Returns the name of its column: `obs`, or `obs.camera` when nested."""
        return f"{prefix}.{self.path}" if self.path else prefix


def integral(numbers: Array) -> bool:
    """Returns whether floats are whole numbers; true for other types."""
    if numbers.dtype.kind != "f":
        return True
    with np.errstate(invalid="ignore"):  # beyond int64
        return bool((numbers.astype(np.int64) == numbers).all())


@dataclass(frozen=True)
class SpaceSpec(PlainData):
    """A space: leaves in a fixed order, and the nesting of dicts and tuples over them."""

    leaves: tuple[Leaf, ...]
    structure: Any
    """An index into `leaves`, or `{"dict": {key: structure}}`, or `{"tuple": [structure]}`."""

    def __str__(self) -> str:
        return self._text(self.structure)

    def _text(self, structure: Any) -> str:
        if isinstance(structure, int):
            leaf = self.leaves[structure]
            return f"an array of shape {leaf.shape} and dtype {leaf.dtype}"
        if "dict" in structure:
            return f"{{{', '.join(f'{key!r}: {self._text(below)}' for key, below in structure['dict'].items())}}}"
        return f"({', '.join(map(self._text, structure['tuple']))})"

    @property
    def choices(self) -> int:
        """Number of options of all its choices; an action mask has an element for each."""
        return sum(sum(leaf.nvec) for leaf in self.leaves)

    def flatten(self, prefix: str, value: Any) -> Columns:
        """Returns a nested (batched) value as columns, with choices from 0. Raises `ValueError` for fractions and text,
        and NumPy's errors."""
        columns: Columns = {}
        for leaf, part in self.parts(value):
            if (given := np.asarray(part)).dtype.kind in "SU":
                raise ValueError(f"{part!r} is text, expected numbers of a {leaf.kind} space")
            if leaf.nvec and not integral(given):
                raise ValueError(f"{given.tolist()} is not a choice of a {leaf.kind} space")
            columns[leaf.column(prefix)] = leaf.counted(part)
        return columns

    def parts(self, value: Any) -> Iterator[tuple[Leaf, Any]]:
        """Yields each leaf with its part of a nested value."""
        return self._parts(self.structure, value)

    def _parts(self, structure: Any, value: Any) -> Iterator[tuple[Leaf, Any]]:
        if isinstance(structure, int):
            yield self.leaves[structure], value
        elif "dict" in structure:
            for key, below in structure["dict"].items():
                yield from self._parts(below, value[key])
        else:
            for below, item in zip(structure["tuple"], value, strict=True):
                yield from self._parts(below, item)

    def nest(self, prefix: str, columns: Mapping[str, Array], structure: Any = None) -> Any:
        """Inverts `flatten`: returns a nested (batched) value in the environment's own terms."""
        structure = self.structure if structure is None else structure
        if isinstance(structure, int):
            leaf = self.leaves[structure]
            return leaf.own_terms(columns[leaf.column(prefix)])
        if "dict" in structure:
            return {key: self.nest(prefix, columns, below) for key, below in structure["dict"].items()}
        return tuple(self.nest(prefix, columns, below) for below in structure["tuple"])

    def to_environment(self, columns: Columns) -> Any:
        """Returns action columns as the environment's action: boxes clipped to their bounds, nested like the space."""
        bounded = dict(columns)
        for leaf in self.leaves:
            if leaf.kind == "box":  # in the space's own dtype: the float32 nearest to a float64 bound may be beyond it
                name = leaf.column("action")
                bounded[name] = np.clip(columns[name].astype(leaf.dtype), *leaf.bounds(leaf.dtype))
        return self.nest("action", bounded)

    def zeros(self, prefix: str, *batch: int) -> Columns:
        return {leaf.column(prefix): np.zeros((*batch, *leaf.shape), leaf.column_dtype) for leaf in self.leaves}

    def column_names(self, prefix: str) -> tuple[str, ...]:
        return tuple(leaf.column(prefix) for leaf in self.leaves)

    @property
    def own(self) -> "SpaceSpec":
        """The agent's part of an observation, without the critic's state (`critic_observes: state`), the second of a
        pair, which has the last leaves."""
        leaves = tuple(leaf for leaf in self.leaves if not leaf.path.startswith(STATE))
        return self if leaves == self.leaves else SpaceSpec(leaves, self.structure["tuple"][0])

    @property
    def state(self) -> "SpaceSpec | None":
        """The environment's state in an observation, for its critic; None without `critic_observes: state`."""
        leaves = tuple(leaf for leaf in self.leaves if leaf.path.startswith(f"{STATE}.seen"))
        return SpaceSpec(leaves, {"tuple": list(range(len(leaves)))}) if leaves else None

    @property
    def mask_columns(self) -> tuple[str, ...]:
        """Columns of `obs` that are action masks."""
        return tuple(leaf.column("obs") for leaf in self.leaves if leaf.mask)


@dataclass(frozen=True)
class PolicySpaces(PlainData):
    observation: SpaceSpec
    action: SpaceSpec

    @property
    def acting(self) -> "PolicySpaces":
        """Spaces without the critic's state: equal for policies that can replace each other."""
        return PolicySpaces(self.observation.own, self.action)

    def without_legal(self, observations: Mapping[str, Array]) -> Array:
        """Returns `[B]`: true for observations `[B, …]` whose mask leaves some choice without a legal option."""
        masks = [observations[name] for name in self.observation.mask_columns]
        legal = np.concatenate([mask.reshape(len(mask), math.prod(mask.shape[1:])) for mask in masks], axis=1) > 0
        sizes = [options for leaf in self.action.leaves for options in leaf.nvec]
        each: Array = np.logical_or.reduceat(legal[:, : self.action.choices], np.cumsum([0, *sizes[:-1]]), axis=1)
        return np.logical_not(each.all(axis=1))


@dataclass(frozen=True)
class EnvironmentDescription(PlainData):
    """The environment as data: agents, their policies and spaces. Stored with the run."""

    agents: dict[str, str]
    """Agent → policy id, in slot order."""
    policies: dict[str, PolicySpaces]
    info_columns: tuple[str, ...] = ()
    """Numbers of each step's `info` in the experience (`environment.info_columns`)."""
    in_turns: bool = False
    """Agents act one after another (PettingZoo's AEC), and a step is one turn."""
    seats: dict[str, str] = field(default_factory=dict)
    """Learning policy → policy whose agents' seats it takes."""
    sides: tuple[tuple[str, ...], ...] = ()
    """Agents of each opposing side; a side has one player."""

    @property
    def seated(self) -> tuple[str, ...]:
        """Policies with agents, which own the environment's slots."""
        return tuple(policy_id for policy_id in self.policies if policy_id in self.agents.values())

    def of(self, policy_ids: Iterable[str]) -> "EnvironmentDescription":
        """Returns the description with only these policies."""
        return replace(self, policies={policy_id: self.policies[policy_id] for policy_id in policy_ids})

    def slots(self, policy_id: str) -> int:
        """Returns the number of agents per environment with this policy, or in whose seats it may act."""
        seat = self.seats.get(policy_id, policy_id)
        return sum(1 for mapped in self.agents.values() if mapped == seat)

    def fragment_bytes(self, steps: int, num_envs: int, state_sizes: Mapping[str, int] | None = None) -> int:
        """Estimates the bytes of observations, actions and state in a fragment of `steps` × `num_envs`."""
        per_env, state = 0, 0
        for policy_id, spaces in self.policies.items():
            leaves = (*spaces.observation.leaves, *spaces.action.leaves)
            row = sum(leaf.size * leaf.column_dtype.itemsize for leaf in leaves) + 12 + 4 * len(self.info_columns)
            per_env += row * self.slots(policy_id)
            state += 4 * (state_sizes or {}).get(policy_id, 0) * self.slots(policy_id)
        return (per_env * steps + state) * num_envs
