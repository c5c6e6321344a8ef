"""What a file holds for a leaf of a space, made a column of it; whatever does not fit is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from shared.errors import DatasetError
from shared.spaces import Array, Columns, Leaf, SpaceSpec

Find = Callable[[Leaf, tuple[str | int, ...]], tuple[str, Array]]
"""Leaf and the way to it → how to name what stands in the file for it, and that."""


def leaf_places(spec: SpaceSpec) -> Iterator[tuple[Leaf, tuple[str | int, ...]]]:
    """Each leaf and the way to it: keys of dicts, indices of tuples."""
    yield from _places(spec, spec.structure, ())


def _places(
    spec: SpaceSpec, structure: Any, way: tuple[str | int, ...]
) -> Iterator[tuple[Leaf, tuple[str | int, ...]]]:
    if isinstance(structure, int):
        yield spec.leaves[structure], way
    elif "dict" in structure:
        for key, below in structure["dict"].items():
            yield from _places(spec, below, (*way, key))
    else:
        for index, below in enumerate(structure["tuple"]):
            yield from _places(spec, below, (*way, index))


def space_columns(spec: SpaceSpec, prefix: str, find: Find) -> Columns:
    """A space's columns, of what `find` finds; raises `DatasetError`."""
    columns = {}
    for leaf, way in leaf_places(spec):
        name, values = find(leaf, way)
        columns[leaf.column(prefix)] = as_column(values, leaf, name, counted=prefix == "action")
    return columns


def as_column(values: Array, leaf: Leaf, name: str, *, counted: bool) -> Array:
    """`[M, …]` in the environment's own terms → the leaf's column; choices are counted from 0.

    Box actions travel as float32 (`counted`: an action). Raises `DatasetError` that begins with `name`.
    """
    values = fitted(values, leaf, name)
    if leaf.kind == "box":
        dtype = np.dtype(np.float32) if counted else leaf.column_dtype
        if dtype.kind != "f":
            _refuse_unless_whole(values, name, dtype)
        with np.errstate(over="ignore"):
            column = values.astype(dtype)
        refuse_infinite(column, name)
        return column
    _refuse_unless_whole(values, name, np.dtype(np.int64))
    start = np.asarray(leaf.start or (0,) * len(leaf.nvec), np.int64).reshape(leaf.shape)
    chosen = values.astype(np.int64) - start
    beyond = (chosen < 0) | (chosen >= np.asarray(leaf.nvec).reshape(leaf.shape))
    if beyond.any():
        raise DatasetError(
            f"{name} holds {values[beyond].flat[0]} in row {_row(beyond)}, which is no choice of the run's space; "
            f"expected {leaf.nvec} choices from {leaf.start or 0}; is it another environment's?"
        )
    return chosen


def fitted(values: Array, leaf: Leaf, name: str) -> Array:
    """Numbers in the leaf's shape, behind the axis of rows; axes of length 1 may be left out or added."""
    if values.dtype.kind not in "biuf":
        raise DatasetError(f"{name} is of type {values.dtype}, expected numbers{_encoded(leaf)}")
    refuse_infinite(values, name)
    found = values.shape[1:]
    if [size for size in found if size != 1] != [size for size in leaf.shape if size != 1] or not values.ndim:
        raise DatasetError(
            f"{name} has the shape {found} in each row, expected {leaf.shape} as in the run's environment"
            f"{_encoded(leaf)}"
        )
    return values.reshape(len(values), *leaf.shape)


def refuse_infinite(values: Array, name: str) -> None:
    """Raises `DatasetError` for NaN and infinite numbers."""
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        row = _row(~np.isfinite(values))
        raise DatasetError(f"{name} holds NaN or infinite values, first in row {row}; leave those episodes out")


def _refuse_unless_whole(values: Array, name: str, dtype: np.dtype[Any]) -> None:
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    odd = (values < low) | (values > high)
    if values.dtype.kind == "f":
        odd |= values != np.floor(values)
    if odd.any():
        raise DatasetError(
            f"{name} holds {values[odd].flat[0]} in row {_row(odd)}, expected whole numbers that fit {dtype}, as in "
            f"the run's environment"
        )


def _row(where: Array) -> int:
    return int(np.argwhere(where)[0][0])


def _encoded(leaf: Leaf) -> str:
    return " (an image must not be stored as JPEG: it would not be what was acted on)" if leaf.is_image else ""
