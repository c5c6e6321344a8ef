"""Spaces as plain data: what an observation or action looks like, and its columns.

A nested gymnasium space becomes a `SpaceSpec`: a list of leaves, each one array, and the structure that nests them.
The trainer, checkpoints and `load_policy` know spaces only in this form, so they need no gymnasium.
(`rollout_worker/environments.py` makes the specs from gymnasium spaces.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Columns = dict[str, Array]
LeafKind = Literal["box", "discrete", "multi_discrete", "multi_binary"]


@dataclass(frozen=True)
class Leaf:
    """One array of a space, without batch axes."""

    path: str
    """Where it is nested, joined by dots; empty for a space that is a single leaf."""
    kind: LeafKind
    shape: tuple[int, ...]
    dtype: str
    nvec: tuple[int, ...] = ()
    """Number of choices: one entry for discrete, one per element for multi_discrete and multi_binary (all 2)."""
    start: tuple[int, ...] = ()
    """Smallest choice, one per entry of `nvec`; columns hold choices counted from 0."""
    low: tuple[float, ...] = ()
    """Box bounds, flattened; a single number stands for all elements."""
    high: tuple[float, ...] = ()

    @property
    def size(self) -> int:
        """Elements of the array."""
        return math.prod(self.shape)

    @property
    def is_image(self) -> bool:
        """Three axes (or four: stacked frames of colour images) of bytes or booleans."""
        return self.kind == "box" and self.dtype in {"uint8", "bool"} and len(self.shape) in {3, 4}

    @property
    def column_dtype(self) -> np.dtype[Any]:
        """The dtype that its column travels in: counted choices are int64."""
        return np.dtype(np.int64) if self.kind != "box" else np.dtype(self.dtype)

    def bounds(self) -> tuple[Array, Array]:
        """Box bounds as float32 arrays of `shape`."""
        with np.errstate(over="ignore"):  # the largest float64 is infinite as a float32
            low, high = (np.asarray(side, np.float64).astype(np.float32) for side in (self.low, self.high))
        return (
            np.broadcast_to(low, (self.size,)).reshape(self.shape).copy(),
            np.broadcast_to(high, (self.size,)).reshape(self.shape).copy(),
        )

    def column(self, prefix: str) -> str:
        """Name of its column: `obs`, or `obs.camera` when nested."""
        return f"{prefix}.{self.path}" if self.path else prefix


@dataclass(frozen=True)
class SpaceSpec:
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

    def flatten(self, prefix: str, value: Any) -> Columns:
        """Nested (batched) value → columns; choices are counted from 0."""
        columns: Columns = {}
        self._flatten(self.structure, prefix, value, columns)
        return columns

    def _flatten(self, structure: Any, prefix: str, value: Any, into: Columns) -> None:
        if isinstance(structure, int):
            leaf = self.leaves[structure]
            array = np.asarray(value, dtype=leaf.column_dtype)
            if any(leaf.start):
                array = array - np.asarray(leaf.start, np.int64).reshape(leaf.shape)
            into[leaf.column(prefix)] = array
        elif "dict" in structure:
            for key, below in structure["dict"].items():
                self._flatten(below, prefix, value[key], into)
        else:
            for below, item in zip(structure["tuple"], value, strict=True):
                self._flatten(below, prefix, item, into)

    def nest(self, prefix: str, columns: Mapping[str, Array]) -> Any:
        """Columns → nested (batched) value in the environment's own terms; the inverse of `flatten`."""
        return self._nest(self.structure, prefix, columns)

    def _nest(self, structure: Any, prefix: str, columns: Mapping[str, Array]) -> Any:
        if isinstance(structure, int):
            leaf = self.leaves[structure]
            array = columns[leaf.column(prefix)]
            if any(leaf.start):
                array = array + np.asarray(leaf.start, np.int64).reshape(leaf.shape)
            return array.astype(leaf.dtype, copy=False)
        if "dict" in structure:
            return {key: self._nest(below, prefix, columns) for key, below in structure["dict"].items()}
        return tuple(self._nest(below, prefix, columns) for below in structure["tuple"])

    def to_environment(self, columns: Columns) -> Any:
        """Action columns → what the environment takes: boxes clipped to their bounds, nested as the space is."""
        bounded = dict(columns)
        for leaf in self.leaves:
            if leaf.kind == "box":  # in the space's own dtype: the float32 nearest to a float64 bound may be beyond it
                name = leaf.column("action")
                sides = (np.broadcast_to(np.asarray(side, leaf.dtype), (leaf.size,)) for side in (leaf.low, leaf.high))
                low, high = (side.reshape(leaf.shape) for side in sides)
                bounded[name] = np.clip(columns[name].astype(leaf.dtype), low, high)
        return self.nest("action", bounded)

    def column_names(self, prefix: str) -> tuple[str, ...]:
        """The names of all columns, in leaf order."""
        return tuple(leaf.column(prefix) for leaf in self.leaves)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"leaves": [_leaf_data(leaf) for leaf in self.leaves], "structure": self.structure}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SpaceSpec:
        """The inverse of `as_dict`."""
        return cls(tuple(_leaf_from(leaf) for leaf in data["leaves"]), data["structure"])


def _leaf_data(leaf: Leaf) -> dict[str, Any]:
    """Plain data; bounds that are infinite become text, which JSON has no number for."""
    sides = {name: [x if math.isfinite(x) else str(x) for x in getattr(leaf, name)] for name in ("low", "high")}
    return asdict(leaf) | sides


def _leaf_from(data: Mapping[str, Any]) -> Leaf:
    plain: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    return Leaf(**plain | {name: tuple(float(x) for x in data[name]) for name in ("low", "high")})


@dataclass(frozen=True)
class PolicySpaces:
    """What one policy sees and does."""

    observation: SpaceSpec
    action: SpaceSpec

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"observation": self.observation.as_dict(), "action": self.action.as_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PolicySpaces:
        """The inverse of `as_dict`."""
        return cls(SpaceSpec.from_dict(data["observation"]), SpaceSpec.from_dict(data["action"]))


@dataclass(frozen=True)
class EnvironmentDescription:
    """The environment as data: which agents act, with which policy, in which spaces. Stored with the run."""

    agents: dict[str, str]
    """Agent → policy id, in slot order."""
    policies: dict[str, PolicySpaces]

    def slots(self, policy_id: str) -> int:
        """Agents per environment that act with this policy."""
        return sum(1 for mapped in self.agents.values() if mapped == policy_id)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "agents": self.agents,
            "policies": {policy_id: spaces.as_dict() for policy_id, spaces in self.policies.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EnvironmentDescription:
        """The inverse of `as_dict`."""
        policies = {policy_id: PolicySpaces.from_dict(item) for policy_id, item in data["policies"].items()}
        return cls(dict(data["agents"]), policies)

    def fragment_bytes(self, steps: int, num_envs: int, state_sizes: Mapping[str, int] | None = None) -> int:
        """About how many bytes of observations, actions and state a fragment of `steps` × `num_envs` holds."""
        per_env, state = 0, 0
        for policy_id, spaces in self.policies.items():
            leaves = (*spaces.observation.leaves, *spaces.action.leaves)
            row = sum(leaf.size * leaf.column_dtype.itemsize for leaf in leaves) + 12
            per_env += row * self.slots(policy_id)
            state += 4 * (state_sizes or {}).get(policy_id, 0) * self.slots(policy_id)
        return (per_env * steps + state) * num_envs
