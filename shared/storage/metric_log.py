"""Metrics in the store: rows in append-only segments, so that a run's curves are complete from any machine.

docs/reference/metrics.md describes the names of segments. Readers skip what an older trainer wrote beyond the
beginning of a newer one, so no row is ever rewritten. Small segments are merged into a larger one of the same rows: a
crash in between leaves both, of which one is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from stagecoach.shared.base import world
from stagecoach.shared.base.errors import FragmentError, MetricsDamaged, ObjectMissing
from stagecoach.shared.experience import tensor_blob
from stagecoach.shared.experience.spaces import Array

if TYPE_CHECKING:
    from stagecoach.shared.storage.object_store import ObjectStore

TRAIN, EVALUATIONS, EPISODES, EVENTS, FLEET = STREAMS = ("train", "evaluations", "episodes", "events", "fleet")
ENV_STEPS, VERSION, UNIX_TIME = "time/env_steps", "policy/version", "time/unix_seconds"
TEST_ENV_STEPS, TEST_EPISODES = "time/test_env_steps", "time/test_episodes"
"""Totals of all evaluations through this row."""
FORMAT = 1
_FOLDER = "metrics/"
_NAME = re.compile(r"(\d+)_(-?\d+)_(\d+)_(\d+)_(-?\d+)(?:_(-?\d+))?")
_MERGED = 8
"""Segments of one size that become one of the next: n rows are written about log8(n) times."""
_LARGEST_ROWS = 1 << 16
_VOIDED = (TRAIN, EPISODES)
"""Streams whose rows beyond the beginning of a newer trainer are undone."""
_TRIES = 5


@dataclass(frozen=True)
class Rows:
    """Ordered rows: a float64 array per metric, NaN for missing values; and each row's label, or ''."""

    columns: dict[str, Array]
    labels: list[str]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: slice) -> Rows:
        return Rows({name: array[rows] for name, array in self.columns.items()}, self.labels[rows])

    def named(self) -> Iterator[tuple[str, dict[str, float]]]:
        """Yields label and metrics of each row."""
        lists = {name: array.tolist() for name, array in self.columns.items()}
        for index, label in enumerate(self.labels):
            yield label, {name: values[index] for name, values in lists.items() if values[index] == values[index]}

    @classmethod
    def of(cls, rows: Sequence[tuple[str, Mapping[str, float]]]) -> Rows:
        """Builds rows from label and metrics of each."""
        names = dict.fromkeys(name for _, row in rows for name in row)
        columns = {name: np.array([row.get(name, np.nan) for _, row in rows], np.float64) for name in names}
        return cls(columns, [label for label, _ in rows])

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        names = dict.fromkeys(name for part in parts for name in part.columns)
        columns = {
            name: np.concatenate([part.columns.get(name, np.full(len(part), np.nan)) for part in parts])
            for name in names
        }
        return cls(columns, [label for part in parts for label in part.labels])


@dataclass(frozen=True)
class Segment:
    """Rows `first` through `last` (counted from 0) of the trainer of one epoch."""

    epoch: int
    version: int
    env_steps: int
    first: int
    last: int
    parent: int
    """Version whose rows it continues: the one that its trainer's first version was trained from."""

    def key(self, stream: str) -> str:
        name = f"{self.epoch}_{self.version}_{self.env_steps}_{self.first}_{self.last}_{self.parent}"
        return f"{_FOLDER}{stream}/{name}/rows.safetensors"

    @property
    def rows(self) -> int:
        return self.last + 1 - self.first


def encode(run_id: str, stream: str, rows: Rows) -> bytes:
    """Returns one blob; the inverse is `decode`."""
    header = {"format": FORMAT, "run_id": run_id, "stream": stream, "labels": rows.labels}
    return tensor_blob.encode(rows.columns, header)


def decode(blob: bytes, key: str) -> Rows:
    """Returns the rows; raises `MetricsDamaged` if the bytes are not a segment."""
    try:
        columns, header = tensor_blob.decode(blob)
        labels = [str(label) for label in header["labels"]]
        of_numbers = ((len(labels),), "<f8")
        if header["format"] != FORMAT or any((its.shape, its.dtype.str) != of_numbers for its in columns.values()):
            raise ValueError(f"format {header['format']} is not read here, or its columns differ in length")
    except (FragmentError, KeyError, TypeError, ValueError) as error:
        raise MetricsDamaged(f"{key} cannot be read: {error}") from None
    return Rows(columns, labels)


class MetricStream:
    """One stream, as the trainer of one epoch writes it. `append` may be called by another thread than `write`."""

    def __init__(
        self, store: ObjectStore, run_id: str, stream: str, epoch: int, version: int, env_steps: int,
        parent: int | None = None,
    ) -> None:  # fmt: skip
        """Begins at this version, which was trained from `parent` (default: itself), and at these env steps."""
        self._store, self._run_id, self._stream = store, run_id, stream
        self._began, self._parent = (epoch, version, env_steps), version if parent is None else parent
        self._pending: list[tuple[str, Mapping[str, float]]] = []
        self._lock = world.Lock()
        self._segments: list[Segment] = []
        self._unmerged = 0
        """Index of the first segment that may be merged; one before it cannot be read."""
        self._marked = epoch <= 1
        """True once the store has this trainer's beginning, beyond which rows of older trainers are void."""
        self._appended = 0

    def append(self, row: Mapping[str, float], label: str = "") -> int:
        """Returns the row's number."""
        with self._lock:
            self._pending.append((label, row))
            self._appended += 1
            return self._appended - 1

    @property
    def pending(self) -> int:
        """Number of rows that are not in the store yet."""
        return len(self._pending)

    def write(self) -> None:
        """Stores pending rows, then merges segments; raises as the store does, and loses nothing."""
        with self._lock:
            rows = list(self._pending)
        if rows:
            first = self._segments[-1].last + 1 if self._segments else 0
            self._segments.append(self._put(Rows.of(rows), first))
            with self._lock:
                del self._pending[: len(rows)]
        elif not self._marked and self._stream in _VOIDED:
            self._put(Rows({}, []), 0)
        self._marked = True
        while (begin := self._to_merge()) is not None:
            parts = self._segments[begin:]
            keys = [part.key(self._stream) for part in parts]
            try:
                merged = Rows.joined([decode(self._store.get(key), key) for key in keys])
            except (MetricsDamaged, ObjectMissing):
                self._unmerged = len(self._segments)
                return
            self._segments[begin:] = [self._put(merged, parts[0].first)]
            for key in keys:
                self._store.delete(key)

    def _put(self, rows: Rows, first: int) -> Segment:
        segment = Segment(*self._began, first, first + len(rows) - 1, self._parent)
        self._store.put(segment.key(self._stream), encode(self._run_id, self._stream, rows))
        return segment

    def _to_merge(self) -> int | None:
        """Returns the index of the first of the last `_MERGED` segments if they have nearly one size."""
        last = self._segments[self._unmerged :][-_MERGED:]
        rows = sum(segment.rows for segment in last)
        if len(last) < _MERGED or rows > _LARGEST_ROWS or last[0].rows > 2 * _MERGED * last[-1].rows:
            return None
        return len(self._segments) - _MERGED


def append_rows(store: ObjectStore, run_id: str, stream: str, rows: Rows) -> None:
    """Adds rows behind those of the last trainer, which has ended."""
    none = Segment(0, 0, 0, 0, -1, 0)
    last = max(segments(store, stream), key=lambda segment: (segment.epoch, segment.last), default=none)
    added = replace(last, first=last.last + 1, last=last.last + len(rows))
    store.put(added.key(stream), encode(run_id, stream, rows))


def segments(store: ObjectStore, stream: str) -> list[Segment]:
    """Lists the segments of a stream in the order of rows; of those that begin alike the longest first."""
    matches = [_NAME.fullmatch(name) for name in store.folders(f"{_FOLDER}{stream}/")]
    found = [Segment(*map(int, match.groups(default=match[2]))) for match in matches if match]
    return sorted(found, key=lambda segment: (segment.epoch, segment.first, -segment.last))


def read(
    store: ObjectStore, stream: str, after: tuple[int, int] = (0, -1),
    damaged: Callable[[MetricsDamaged], None] | None = None,
) -> Iterator[tuple[tuple[int, int], Rows]]:  # fmt: skip
    """Yields the rows of a stream by segment, each with epoch and number of its last row.

    Args:
        after: epoch and number of the row to begin behind.
        damaged: called with the error of each unreadable segment, which is skipped; without it they raise.

    Raises `MetricsDamaged`, or what the store raises.
    """
    for attempt in range(_TRIES):
        try:
            for position, rows in _read(store, stream, after, damaged):
                after = position
                yield position, rows
            return
        except ObjectMissing:  # it was merged into another one meanwhile
            if attempt == _TRIES - 1:
                raise


def _read(
    store: ObjectStore, stream: str, after: tuple[int, int], damaged: Callable[[MetricsDamaged], None] | None
) -> Iterator[tuple[tuple[int, int], Rows]]:
    found = segments(store, stream)
    epoch, covered = after
    ends = _ends(found)
    for segment in found:
        if segment.epoch < epoch or (segment.epoch == epoch and segment.last <= covered):
            continue
        if segment.epoch > epoch:
            epoch, covered = segment.epoch, -1
        try:
            blob = store.get(key := segment.key(stream))
        except ObjectMissing:
            if _cut_off(segment, segments(store, stream)):
                continue
            raise
        try:
            rows = decode(blob, key)[max(0, covered + 1 - segment.first) :]
        except MetricsDamaged as error:
            if damaged is None:
                raise
            damaged(error)
            continue
        covered = segment.last
        if stream in _VOIDED:  # a score, and what has happened, stay, whatever was undone since
            rows = _through(ends.get(epoch), rows)
        yield (epoch, covered), rows


def _cut_off(segment: Segment, found: Sequence[Segment]) -> bool:
    """Checks whether a segment without its object is the rest of an interrupted put, and not merged into another."""
    ours = [other for other in found if other.epoch == segment.epoch]
    return [other for other in ours if other.first <= segment.first and other.last >= segment.last] == [segment]


def _ends(found: Sequence[Segment]) -> dict[int, tuple[float, float]]:
    """Returns epoch → version and env steps through which its rows count, for the epochs that the newest continues."""
    began = {segment.epoch: segment for segment in found}
    ends, at, older = {}, (math.inf, math.inf), list(began)
    while older:
        first = began[max(older)]
        ends[first.epoch] = at
        at = min(at[0], first.version), min(at[1], first.env_steps)
        older = [epoch for epoch, its in began.items() if epoch < first.epoch and its.version <= first.parent]
    return ends


def _through(end: tuple[float, float] | None, rows: Rows) -> Rows:
    """Returns the rows that were not undone: none of an abandoned trainer, whose `end` is absent."""
    if not len(rows) or end == (math.inf, math.inf):
        return rows
    version, env_steps = end or (-math.inf, -math.inf)
    kept = (rows.columns[VERSION] <= version) & (rows.columns[ENV_STEPS] <= env_steps)
    labels = [label for label, keep in zip(rows.labels, kept, strict=True) if keep]
    return Rows({name: array[kept] for name, array in rows.columns.items()}, labels)
