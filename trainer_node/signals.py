"""Signals: the run's figures under the field's names, to CSV, TensorBoard, and Redis (for the console and `status`).

They inform. Whatever a writer meets (a full disk, a name that an environment has made up), training continues: the
failure is counted, and told once.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import mmap
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import redis

from shared.config import SignalsConfig
from shared.events import emit
from shared.printable import NAME_CHARACTERS, printable
from shared.redis_keys import RunKeys
from shared.scripts import write_small

_LOGGER = logging.getLogger("stagecoach.trainer")
_ENV_STEPS = "time/env_steps"
_MOST_FIGURES = 1000
"""Names that one process writes; an environment may make up a new one in each episode."""


class Signals:
    """Writes one row of figures per published version; none of it raises."""

    def __init__(self, client: redis.Redis, run_id: str, config: SignalsConfig, folder: Path | None) -> None:
        self._redis = client
        self._keys = RunKeys(run_id)
        self._table = FigureTable(folder / "train.csv") if folder is not None and config.csv else None
        self._board = folder / "tensorboard" if folder is not None and config.tensorboard else None
        self._names: set[str] = set()
        self._events: EventFile | None = None
        self.failures: Counter[str] = Counter()
        """By writer, the rows that it could not write."""

    def start(self, env_steps: int) -> None:
        """Opens the files; rows beyond `env_steps` are of a future that a restart has undone, and go."""
        if self._table is not None:
            with self._going_on("train.csv"):
                self._table.start(env_steps)
        if self._board is not None:
            self._events = EventFile(self._board, env_steps + 1)

    def write(self, figures: Mapping[str, float], env_steps: int) -> None:
        """One row."""
        row: dict[str, float] = {}
        with self._going_on("the figures"):
            row = self._row(figures)
        with self._going_on("Redis"):
            shown = json.dumps({name: value if math.isfinite(value) else None for name, value in row.items()})
            write_small(self._redis, self._keys.flow, self._keys.signals, "SET", shown)
        if self._table is not None:
            with self._going_on("train.csv"):
                self._table.append(row)
        if self._events is not None:
            with self._going_on("TensorBoard"):
                self._events.append(row, env_steps)

    def _row(self, figures: Mapping[str, float]) -> dict[str, float]:
        """Under printable names, of which there is a bound."""
        row = {printable(name, NAME_CHARACTERS): float(value) for name, value in figures.items()}
        new = [name for name in row if name not in self._names]
        room = _MOST_FIGURES - len(self._names)
        self._names.update(new[:room])
        for name in new[room:]:
            del row[name]
        if new[room:]:
            self._failed("the figures", f"there are more than {_MOST_FIGURES} names, {new[room]!r} is left out")
        return row

    @contextmanager
    def _going_on(self, writer: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever it is, no figure is worth a run
            self._failed(writer, f"{type(error).__name__}: {error}")

    def _failed(self, writer: str, why: str) -> None:
        self.failures[writer] += 1
        if self.failures[writer] == 1:
            text = f"{writer} cannot be written, training continues: {why}"
            _LOGGER.warning("%s", text)
            emit(self._redis, self._keys.run_id, "signals", text)


_HEADER_BYTES = 1 << 20


class FigureTable:
    """`train.csv`: a row per update, at its end; what it costs does not depend on how many there are."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns: list[str] = []

    def start(self, env_steps: int) -> None:
        """Removes the rows beyond `env_steps`, and one that a crash cut off, reading backwards from the end."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._columns = []
        if not self._path.exists():
            return
        with self._path.open("r+b") as file:
            header = file.readline(_HEADER_BYTES)
            columns = next(csv.reader([header.decode(errors="replace")]), [])
            if not header.endswith(b"\n") or _ENV_STEPS not in columns:
                file.truncate(0)
                return
            self._columns = columns
            with mmap.mmap(file.fileno(), 0) as data:
                end = _end_of_rows(data, len(header), columns.index(_ENV_STEPS), env_steps)
            file.truncate(end)

    def append(self, row: Mapping[str, float]) -> None:
        """One row; a name that no row had so far becomes a column, for which the file is copied once."""
        new = [name for name in row if name not in self._columns]
        if new:
            self._widen(self._columns + new, len(new))
            self._columns += new
        text = _line([repr(float(row[name])) if name in row else "" for name in self._columns])
        _append(self._path, text)

    def _widen(self, columns: Sequence[str], more: int) -> None:
        """Rows that are there get empty fields; a row at a time, since there may be millions."""
        temporary = self._path.with_suffix(".partial")
        with temporary.open("wb") as copy:
            copy.write(_line(columns))
            with suppress(FileNotFoundError), self._path.open("rb") as file:
                file.readline()
                for row in file:
                    copy.write(row.rstrip(b"\r\n") + b"," * more + b"\r\n")
        temporary.replace(self._path)


class EventFile:
    """What TensorBoard reads, with a row in each event: it costs a tenth of an event for each figure.

    TensorBoard's own writer has a thread that a full disk ends for good; here each row is tried for itself.
    """

    def __init__(self, folder: Path, purge_step: int) -> None:
        """What former files hold from `purge_step` on is not shown any more."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # takes a while, and is not always wanted
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        def record(**what: Any) -> bytes:
            data = io.BytesIO()
            RecordWriter(data).write(Event(wall_time=time.time(), **what).SerializeToString())
            return data.getvalue()

        def event(row: Mapping[str, float], step: int) -> bytes:
            values = [Summary.Value(tag=name, simple_value=row[name]) for name in row]
            return record(step=step, summary=Summary(value=values))

        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._path, self._event = folder / name, event
        self._header = record(step=purge_step, file_version="brain.Event:2")
        self._header += record(step=purge_step, session_log=SessionLog(status=SessionLog.START))

    def append(self, row: Mapping[str, float], env_steps: int) -> None:
        """One row; raises `OSError`, and has then written nothing."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _append(self._path, self._header + self._event(row, env_steps))
        self._header = b""


def _append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        size = file.tell()
        try:
            file.write(data)
            file.flush()
        except OSError:  # the disk is full: half a row would spoil the next one
            with suppress(OSError):
                file.truncate(size)
            raise


def _end_of_rows(data: mmap.mmap, begin: int, column: int, env_steps: int) -> int:
    """Where the last row of at most `env_steps` ends; rows come in the order of their steps."""
    end = data.rfind(b"\n") + 1
    while end > begin:
        start = data.rfind(b"\n", begin - 1, end - 1) + 1
        fields = data[start:end].split(b",", column + 1)
        try:
            if float(fields[column]) <= env_steps:
                return end
        except (IndexError, ValueError):
            pass  # it was cut off, or is no row of ours
        end = start
    return begin


def _line(fields: Sequence[str]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerow(fields)
    return text.getvalue().encode()
