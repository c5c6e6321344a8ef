"""A recording: all transitions of a dataset as columns, and fragments' columns cut from it.

Episodes lie end to end. Observations have one row more per episode than steps (the one after the last step), so the
observation after step m of episode e is the row after that of step m: m + e + 1.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from stagecoach.shared.base.errors import DatasetError
from stagecoach.shared.config.recorded import RecordedConfig
from stagecoach.shared.experience.fragment import EpisodeRecord
from stagecoach.shared.experience.spaces import Array, Columns, EnvironmentDescription, Leaf, PolicySpaces


@dataclass(frozen=True)
class Episode:
    """An episode of L steps, or the recorded part of it."""

    observations: Columns
    """`obs…` `[L + 1, …]`: the last row was observed after the last step."""
    actions: Columns
    """`action…` `[L, …]`."""
    reward: Array
    """`[L]`, float32."""
    log_prob: Array
    """`[L]`, float32; NaN where it is not known."""
    terminated: bool
    """The last step terminated the episode; otherwise it was truncated, or the data end there."""
    record: EpisodeRecord | None
    """Outcome of the episode; None if its start or end is not in the data."""
    last_known: bool = True
    """The data have the observation after the last step. Otherwise the step terminated, and the row before is
    repeated."""
    info: Columns = field(default_factory=dict)
    """`info/NAME` `[L]`, float32, of the run's `environment.info_columns`; NaN where it is not known."""
    begun: bool = True
    """The first row starts an episode."""

    def __len__(self) -> int:
        return len(self.reward)


class Recording:
    def __init__(self, spaces: PolicySpaces, episodes: Sequence[Episode], where: str) -> None:
        """Raises `DatasetError` if there are no steps, or an action is forbidden by its own mask."""
        kept = [episode for episode in episodes if len(episode)]
        if not kept:
            raise DatasetError(f"{where} holds no transition; expected at least one")
        self.spaces = spaces
        self.where = where
        its = [
            item.observations | item.actions | item.info | {"reward": item.reward, "log_prob": item.log_prob}
            for item in kept
        ]
        self.columns = {name: np.concatenate([columns[name] for columns in its]) for name in its[0]}
        lengths = np.array([len(episode) for episode in kept])
        self._starts, self._ends = np.cumsum(lengths) - lengths, np.cumsum(lengths) - 1
        self._terminated = np.array([episode.terminated for episode in kept])
        self._last_known = np.array([episode.last_known for episode in kept])
        self._begun = [episode.begun for episode in kept]
        self.records = tuple(episode.record for episode in kept)
        self._info_columns = tuple(kept[0].info)
        self._check_legal(lengths)

    def _check_legal(self, lengths: Array) -> None:
        rows = np.arange(len(self)) + np.repeat(np.arange(len(lengths)), lengths)
        masks = [self.columns[name][rows].reshape(len(self), -1) for name in self.spaces.observation.mask_columns]
        if not masks:
            return
        legal = np.concatenate(masks, axis=1) > 0
        legal |= ~legal.any(axis=1, keepdims=True)  # none at all: it is not known (shared/policies/masks.py)
        first = 0
        for leaf in self.spaces.action.leaves:
            name = leaf.column("action")
            for number, count in enumerate(leaf.nvec):
                chosen = self.columns[name].reshape(len(self), -1)[:, number].astype(np.int64)
                if len(wrong := np.flatnonzero(~legal[np.arange(len(self)), first + chosen])):
                    episode = int(np.repeat(np.arange(len(lengths)), lengths)[wrong[0]])
                    raise DatasetError(
                        f"{self.where}: {name} is {chosen[wrong[0]] + (leaf.starts().flat[number])} in step "
                        f"{wrong[0] - self._starts[episode]} of episode {episode} (counted from 0), which the action "
                        f"mask observed there forbids, as in {len(wrong)} steps in all; leave those episodes out"
                    )
                first += count

    def __len__(self) -> int:
        return len(self.columns["reward"])

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the transitions: the same for the same transitions in any format."""
        found = hashlib.sha256()
        arrays = self.columns | {"ends": self._ends, "terminated": self._terminated, "last_known": self._last_known}
        for name, array in sorted(arrays.items()):
            found.update(f"{name} {array.dtype.str} {array.shape};".encode())
            found.update(np.ascontiguousarray(array).data)
        found.update(repr(self.records).encode())
        return found.hexdigest()

    def episodes(self) -> Iterator[Episode]:
        for number, (start, end) in enumerate(zip(self._starts.tolist(), self._ends.tolist(), strict=True)):
            steps, rows = slice(start, end + 1), slice(start + number, end + number + 2)
            yield Episode(
                {name: self.columns[name][rows] for name in self.spaces.observation.column_names("obs")},
                {name: self.columns[name][steps] for name in self.spaces.action.column_names("action")},
                self.columns["reward"][steps],
                self.columns["log_prob"][steps],
                bool(self._terminated[number]),
                self.records[number],
                bool(self._last_known[number]),
                {name: self.columns[name][steps] for name in self._info_columns},
                self._begun[number],
            )

    def pieces(self, steps: int) -> int:
        """The number of pieces of `steps` steps; the last one may be shorter."""
        return -(-len(self) // steps)

    def cut(self, pieces: Sequence[int] | Array, steps: int) -> tuple[Columns, list[EpisodeRecord]]:
        """Returns pieces as a fragment's columns (shared/experience/fragment.py), and the episodes that ended in them.

        Masked steps fill up a piece of less than `steps`. An episode that was cut off ends like a truncated one.
        """
        step = np.arange(steps)[:, None] + np.asarray(pieces, np.int64)[None, :] * steps
        mask = step < len(self)
        step = np.minimum(step, len(self) - 1)
        episode = np.searchsorted(self._ends, step)
        ended = mask & (step == self._ends[episode])
        terminated = self._terminated[episode]
        columns: Columns = {"mask": mask, "terminated": ended & terminated, "truncated": ended & ~terminated}
        final = np.argwhere(ended & self._last_known[episode])
        after = step + episode + 1
        for name in self.spaces.observation.column_names("obs"):
            rows = self.columns[name]
            columns[name] = rows[step + episode]
            columns[f"bootstrap_{name}"] = rows[after[-1]]
            columns[f"final_{name}"] = rows[after[final[:, 0], final[:, 1]]]
        for name in self.spaces.action.column_names("action"):
            columns[name] = self.columns[name][step]
        for name in ("reward", "log_prob"):
            columns[name] = np.where(mask, self.columns[name][step], np.float32(0))
        for name in self._info_columns:
            columns[name] = np.where(mask, self.columns[name][step], np.float32(np.nan))
        columns["final_index"] = final.astype(np.int32)
        known = [self.records[number] for number in episode[ended].tolist()]
        return columns, [record for record in known if record is not None]


class Recordings(dict[str, Recording]):
    """Policy id → its recording."""

    @property
    def sha256(self) -> str:
        """SHA-256 of the transitions; for a single policy the recording's own."""
        hashes = [f"{policy_id} {self[policy_id].sha256}" for policy_id in sorted(self)]
        return hashes[0][-64:] if len(hashes) == 1 else hashlib.sha256("\n".join(hashes).encode()).hexdigest()


DatasetReader = Callable[[RecordedConfig, EnvironmentDescription], Recordings]
"""`read_dataset`, handed to learners, since they reach no files or servers themselves."""


def as_column(name: str, values: Array, leaf: Leaf, *, action: bool) -> Array:
    """`[M, …]` in the environment's own terms → the leaf's column; choices are counted from 0. Box actions travel as
    float32. Axes of length 1 may be left out or added. Raises `DatasetError` that begins with `name`."""
    image = " (an image must not be stored as JPEG: it would not be what was acted on)" if leaf.is_image else ""
    if values.dtype.kind not in "biuf":
        raise DatasetError(f"{name} is of type {values.dtype}, expected numbers{image}")
    _check_finite(values, name)
    found = values.shape[1:]
    if [size for size in found if size != 1] != [size for size in leaf.shape if size != 1] or not values.ndim:
        raise DatasetError(
            f"{name} has the shape {found} in each row, expected {leaf.shape} as in the run's environment{image}"
        )
    values = values.reshape(len(values), *leaf.shape)
    if leaf.kind == "box":
        dtype = np.dtype(np.float32) if action else leaf.column_dtype
        if dtype.kind != "f":
            _check_whole(values, name, dtype)
        with np.errstate(over="ignore"):
            column = values.astype(dtype)
        _check_finite(column, name)
        return column
    _check_whole(values, name, np.dtype(np.int64))
    chosen = values.astype(np.int64) - leaf.starts()
    beyond = leaf.beyond(chosen)
    if beyond.any():
        raise DatasetError(
            f"{name} holds {values[beyond].flat[0]} in row {_row(beyond)}, expected one of {leaf.nvec} choices from "
            f"{leaf.start or 0}; is the dataset from another environment?"
        )
    return chosen


def _check_finite(values: Array, name: str) -> None:
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        row = _row(~np.isfinite(values))
        raise DatasetError(f"{name} holds NaN or infinite values, first in row {row}; leave those episodes out")


def _check_whole(values: Array, name: str, dtype: np.dtype[Any]) -> None:
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


@dataclass(frozen=True)
class Table:
    """M transitions in order."""

    obs: Columns
    action: Columns
    reward: Array
    terminated: Array
    truncated: Array
    log_prob: Array
    """NaN where it is unknown."""
    next_obs: Columns | None = None
    """`obs…`: what was observed after each step."""
    cut_after: Array | None = None
    """Rows after which another episode starts without termination or truncation."""
    starts_episode: bool = True
    """The first row starts an episode."""
    next_known: Array | None = None
    """`[M]`, bool: where `next_obs` is valid (it may not be after a step that terminated). None: everywhere."""
    info: Columns = field(default_factory=dict)
    """`info/NAME` `[M]`, float32; NaN where it is unknown."""


def episodes_of(table: Table) -> Iterator[Episode]:
    """The episodes of a table.

    Without `next_obs` it is not known what was observed after the last step of an episode. Where that step terminated,
    nothing is bootstrapped from it. Elsewhere the step is left out and the episode is truncated where it was last
    observed; its return is still that of all its steps.
    """
    ends = table.terminated | table.truncated
    bounds = ends | (False if table.cut_after is None else table.cut_after)
    bounds[-1:] = True
    first = 0
    for last in np.flatnonzero(bounds).tolist():
        rows = slice(first, last + 1)
        begun = table.starts_episode or first > 0
        record = EpisodeRecord(float(table.reward[rows].sum(dtype=np.float64)), last + 1 - first)
        yield _episode(table, first, last, record if begun and ends[last] else None, begun)
        first = last + 1


def _episode(table: Table, first: int, last: int, record: EpisodeRecord | None, begun: bool) -> Episode:
    terminated = bool(table.terminated[last])
    told = table.next_obs if table.next_known is None or table.next_known[last] else None
    after, rows = slice(last, last + 1), slice(first, last + 1)
    if told is None and not terminated:
        last, after = last - 1, slice(0)
    steps = slice(first, last + 1)
    return Episode(
        {name: np.concatenate([array[rows], (told or table.obs)[name][after]]) for name, array in table.obs.items()},
        {name: array[steps] for name, array in table.action.items()},
        table.reward[steps],
        table.log_prob[steps],
        terminated,
        record,
        told is not None or not terminated,
        {name: array[steps] for name, array in table.info.items()},
        begun,
    )


def numbers(values: Array, rows: int, name: str, *, unknown: bool = False) -> Array:
    """`[M]` float32, NaN only where `unknown` allows for it; raises `DatasetError`."""
    if values.dtype.kind not in "biuf" or values.size != rows:
        raise DatasetError(f"{name} is {values.dtype}{values.shape}, expected {rows} numbers, one for each row")
    with np.errstate(over="ignore"):
        column = values.reshape(rows).astype(np.float32)
    _check_finite(np.where(np.isnan(column), 0, column) if unknown else column, name)
    return column


def flags(values: Array, rows: int, name: str) -> Array:
    """`[M]` bool, from booleans or 0 and 1; raises `DatasetError`."""
    if values.dtype.kind not in "biuf" or values.size != rows or not np.isin(values, (0, 1)).all():
        raise DatasetError(f"{name} is {values.dtype}{values.shape}, expected {rows} times true or false (1 or 0)")
    return values.reshape(rows).astype(np.bool_)
