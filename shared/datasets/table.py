"""One row per transition, episode after episode, as CSV and flat HDF5 files have it → episodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shared.datasets.leaves import refuse_infinite
from shared.datasets.recording import Episode
from shared.errors import DatasetError
from shared.fragment import EpisodeRecord
from shared.spaces import Array, Columns


@dataclass(frozen=True)
class Table:
    """M transitions in order."""

    obs: Columns
    action: Columns
    reward: Array
    terminated: Array
    truncated: Array
    log_prob: Array | None = None
    """NaN where it is not known. None: nowhere."""
    next_obs: Columns | None = None
    """`obs…`: what was observed after each step."""
    cut_after: Array | None = None
    """After which rows another episode begins, though the row neither terminated nor truncated."""
    whole: bool = True
    """Whether the first row begins an episode."""
    next_known: Array | None = None
    """`[M]`, bool: where `next_obs` means something; it may not where a step terminated. None: everywhere."""


def episodes_of(table: Table) -> Iterator[Episode]:
    """The episodes of it.

    Without `next_obs` it is not known what was observed after the last step of an episode. Where that step terminated,
    nothing is bootstrapped from it. Elsewhere the step is left out and the episode is truncated where it was last
    observed; its return is still that of all its steps.
    """
    ends = table.terminated | table.truncated
    bounds = ends if table.cut_after is None else ends | table.cut_after
    bounds = bounds.copy()
    bounds[-1:] = True
    first = 0
    for last in np.flatnonzero(bounds).tolist():
        rows = slice(first, last + 1)
        known = bool(ends[last]) and (table.whole or first > 0)
        record = EpisodeRecord(float(table.reward[rows].sum(dtype=np.float64)), last + 1 - first) if known else None
        yield _episode(table, first, last, record)
        first = last + 1


def _episode(table: Table, first: int, last: int, record: EpisodeRecord | None) -> Episode:
    terminated = bool(table.terminated[last])
    told = table.next_obs if table.next_known is None or table.next_known[last] else None
    observed = {name: array[first : last + 1] for name, array in table.obs.items()}
    if told is not None:
        after = {name: array[last : last + 1] for name, array in told.items()}
    elif terminated:
        after = {name: array[-1:] for name, array in observed.items()}
    else:
        last -= 1
        after = {name: array[:0] for name, array in observed.items()}
    steps = slice(first, last + 1)
    return Episode(
        {name: np.concatenate([array, after[name]]) for name, array in observed.items()},
        {name: array[steps] for name, array in table.action.items()},
        table.reward[steps],
        np.full(last + 1 - first, np.nan, np.float32) if table.log_prob is None else table.log_prob[steps],
        terminated,
        record,
        told is not None or not terminated,
    )


def numbers(values: Array, rows: int, name: str, *, unknown: bool = False) -> Array:
    """`[M]` float32, NaN only where `unknown` allows for it; raises `DatasetError`."""
    if values.dtype.kind not in "biuf" or values.size != rows:
        raise DatasetError(f"{name} is {values.dtype}{values.shape}, expected {rows} numbers, one for each row")
    with np.errstate(over="ignore"):
        column = values.reshape(rows).astype(np.float32)
    refuse_infinite(np.where(np.isnan(column), 0, column) if unknown else column, name)
    return column


def flags(values: Array, rows: int, name: str) -> Array:
    """`[M]` bool, from booleans or 0 and 1; raises `DatasetError`."""
    if values.dtype.kind not in "biuf" or values.size != rows or not np.isin(values, (0, 1)).all():
        raise DatasetError(f"{name} is {values.dtype}{values.shape}, expected {rows} times true or false (1 or 0)")
    return values.reshape(rows).astype(np.bool_)
