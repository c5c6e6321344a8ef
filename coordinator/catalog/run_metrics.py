"""Curves of a run: the records in its store, and newer rows in a live run's Redis.

`all_rows` reads every row, for export. `Curves` reduces them while they are read to some thousand bins with mean and
bounds, so that a run of millions of rows takes bounded memory and time to show.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import redis

from stagecoach.shared.base import world
from stagecoach.shared.base.errors import StagecoachError
from stagecoach.shared.base.printable import left_out
from stagecoach.shared.experience.log_entry import id_order
from stagecoach.shared.experience.spaces import Array
from stagecoach.shared.protocol.events import Event, event_row, read_evaluations, recorded_event
from stagecoach.shared.protocol.metric_tail import TailRow, read_rows
from stagecoach.shared.storage.metric_log import (
    ENV_STEPS,
    EVALUATIONS,
    EVENTS,
    TRAIN,
    UNIX_TIME,
    Rows,
    append_rows,
    read,
    segments,
)
from stagecoach.shared.storage.object_store import ObjectStore
from stagecoach.trainer_node.metrics.recorder import evaluation_row

_LEAVE_OUT = partial(left_out, "a segment of the metrics")
_STORE_SECONDS = 10.0
"""Interval between reads of the store for a run without a live Redis."""


def all_rows(
    store: ObjectStore, stream: str, client: redis.Redis | None, run_id: str, after: tuple[int, int] = (0, -1),
    instead: ObjectStore | None = None,
) -> Iterator[Rows]:  # fmt: skip
    """Yields every row of a stream in order, in parts; `client` is the Redis of a live run.

    Where store or Redis fail, as at the end of the run, the rest comes from the store `instead`.

    Do not pass `after` (epoch and number of a row) for evaluations: rows before it would repeat from Redis.
    """
    position, labels = after, set[str]()
    try:
        for last, rows in read(store, stream, after):
            position, labels = last, labels | set(rows.labels)
            yield rows
        tail = Rows({}, []) if client is None else _tail(client, run_id, stream, position, labels)
    except (StagecoachError, redis.RedisError):
        if instead is None:
            raise
        yield from (rows for _, rows in read(instead, stream, position))
    else:
        if len(tail):
            yield tail


def _tail(client: redis.Redis, run_id: str, stream: str, position: tuple[int, int], labels: set[str]) -> Rows:
    """Rows that only Redis has so far: `train` behind a position, evaluations without known labels."""
    if stream == TRAIN:
        return _rows_of(_behind(read_rows(client, run_id), position))
    found = read_evaluations(client, run_id) if stream == EVALUATIONS else {}
    return Rows.of([(name, evaluation_row(scores)) for name, scores in found.items() if name not in labels])


def last_row(
    store: ObjectStore, stream: str, client: redis.Redis | None = None, run_id: str = ""
) -> tuple[str, dict[str, float]]:
    """Label and metrics of a stream's newest row, or empty; does not read all rows.

    A new trainer without rows may have voided the newest rows of its predecessor.
    """
    places = sorted(((item.epoch, item.last) for item in segments(store, stream) if item.rows), reverse=True)
    by_label = stream == EVALUATIONS and client is not None  # only all labels show which of Redis's rows are new
    behind = [] if by_label else [(epoch, last - 1) for epoch, last in places]
    for place in (*behind, (0, -1)):
        newest = ("", dict[str, float]())
        for rows in all_rows(store, stream, client, run_id, place):
            newest = next(rows[len(rows) - 1 :].named()) if len(rows) else newest
        if newest[1]:
            return newest
    return "", {}


def _rows_of(tail: list[TailRow]) -> Rows:
    return Rows.of([("", {name: value for name, value in item.row.items() if value is not None}) for item in tail])


def _behind(tail: list[TailRow], position: tuple[int, int]) -> list[TailRow]:
    """Rows of the same trainer after a position; a newer trainer's wait until the store shows which rows it voided."""
    epoch = position[0] or min((item.epoch for item in tail), default=0)
    return [item for item in tail if item.epoch == epoch and (item.epoch, item.number) > position]


@dataclass(frozen=True)
class Series:
    """One metric over env steps and time: arrays of one length."""

    env_steps: Array
    unix_seconds: Array
    mean: Array
    low: Array
    high: Array

    def as_lists(self) -> dict[str, list[float]]:
        return {name: np.round(array, 6).tolist() for name, array in vars(self).items()}


def record_events(store: ObjectStore, run_id: str, events: Sequence[Event]) -> None:
    """Adds the events that the trainer of an ended run has not recorded; raises the store's errors."""
    recorded = Recorded(EVENTS)
    recorded.refresh(store)
    last = id_order(recorded_event(*recorded.rows[-1]).id) if recorded.rows else (0, 0)
    if new := [event_row(event) for event in events if id_order(event.id) > last]:
        append_rows(store, run_id, EVENTS, Rows.of(new))


class Bins:
    """Rows in their order, in at most `2 * points` bins of equally many rows: of each metric sum, count and bounds."""

    def __init__(self, points: int) -> None:
        self._points, self._stride, self.rows = points, 1, 0  # rows: how many were added
        self._columns: dict[str, tuple[Array, Array, Array, Array]] = {}

    def add(self, rows: Rows) -> None:
        if not len(rows):
            return
        while (self.rows + len(rows) - 1) // self._stride >= 2 * self._points:
            self._halve()
        index = (self.rows + np.arange(len(rows))) // self._stride
        starts = np.flatnonzero(np.diff(index, prepend=index[0] - 1))
        bins = index[starts]
        for name, values in rows.columns.items():
            total, count, low, high = self._columns.get(name) or self._new(name)
            known = ~np.isnan(values)
            total[bins] += np.add.reduceat(np.where(known, values, 0.0), starts)
            count[bins] += np.add.reduceat(known.astype(np.float64), starts)
            low[bins] = np.fmin(low[bins], np.fmin.reduceat(values, starts))
            high[bins] = np.fmax(high[bins], np.fmax.reduceat(values, starts))
        self.rows += len(rows)

    def _new(self, name: str) -> tuple[Array, Array, Array, Array]:
        size = 2 * self._points
        self._columns[name] = (np.zeros(size), np.zeros(size), np.full(size, np.nan), np.full(size, np.nan))
        return self._columns[name]

    def _halve(self) -> None:
        self._stride *= 2
        reducers: tuple[Callable[..., Array], ...] = (np.add, np.add, np.fmin, np.fmax)
        for name, columns in self._columns.items():
            total, count, low, high = self._new(name)
            for made, array, reduce in zip((total, count, low, high), columns, reducers, strict=True):
                made[: self._points] = reduce(array[::2], array[1::2])

    @property
    def names(self) -> list[str]:
        return sorted(self._columns)

    def __getitem__(self, name: str) -> Series:
        """Raises `KeyError` for a metric that no row had."""
        _, count, low, high = self._columns[name]
        there = count > 0
        steps, seconds = (self._mean(axis)[there] for axis in (ENV_STEPS, UNIX_TIME))
        return Series(steps, seconds, self._mean(name)[there], low[there], high[there])

    def _mean(self, name: str) -> Array:
        total, count, _, _ = self._columns[name]
        mean: Array = total / np.maximum(count, 1.0)
        return mean


class Curves:
    """Bins of one stream of a run; `refresh` reads new rows."""

    def __init__(self, run_id: str, stream: str = TRAIN, points: int = 1000) -> None:
        self._run_id, self._stream, self._points = run_id, stream, points
        self._begin()
        self._read_store_at = -_STORE_SECONDS

    def _begin(self) -> None:
        self.bins, self._position, self._tail = Bins(self._points), (0, -1), "0-0"

    def refresh(self, store: ObjectStore, client: redis.Redis | None) -> None:
        """Reads new rows; raises the errors of store and Redis."""
        now = world.monotonic()
        if client is None or self._stream != TRAIN:
            if now - self._read_store_at >= _STORE_SECONDS:
                self._from_store(store)
            return
        tail = read_rows(client, self._run_id, self._tail)
        epoch, number = self._position
        new = [item for item in tail if (item.epoch, item.number) > (epoch, number)]
        if self._position == (0, -1) or (new and (new[0].epoch, new[0].number) != (epoch, number + 1)):
            self._from_store(store)  # earlier rows, or rows voided by a restart
            tail = read_rows(client, self._run_id)
        if new := _behind(tail, self._position):
            self.bins.add(_rows_of(new))
            self._position, self._tail = (new[-1].epoch, new[-1].number), new[-1].id

    def _from_store(self, store: ObjectStore) -> None:
        self._read_store_at, (known, _) = world.monotonic(), self._position
        for position, rows in read(store, self._stream, self._position, damaged=_LEAVE_OUT):
            if known not in (0, position[0]):  # a new trainer may have voided rows
                self._begin()
                self._from_store(store)
                return
            self.bins.add(rows)
            self._position = position


class Recorded:
    """All rows of a short stream with their labels; `refresh` reads new rows."""

    def __init__(self, stream: str) -> None:
        self._stream, self._position = stream, (0, -1)
        self._read_at = -_STORE_SECONDS
        self.rows: list[tuple[str, dict[str, float]]] = []

    def refresh(self, store: ObjectStore, every_seconds: float = _STORE_SECONDS) -> bool:
        """Reads new rows, if it has not for so long; returns whether it did. Raises the store's errors."""
        if due := world.monotonic() - self._read_at >= every_seconds:
            self._read_at = world.monotonic()
            for position, rows in read(store, self._stream, self._position, damaged=_LEAVE_OUT):
                self._position = position
                self.rows += rows.named()
        return due


def ratings_in(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Policy → league rating in a row of training metrics."""
    prefix = "league/rating/"
    return {name.removeprefix(prefix): its for name, its in sorted(metrics.items()) if name.startswith(prefix)}
