"""Tables in the run's folder: `train.csv`, `evaluations.csv`, `episodes.csv`, or the same as JSON lines.

A restart removes the rows of `train` and `episodes` beyond the env steps at which it begins, and what a crash cut off.
"""

from __future__ import annotations

import csv
import io
import json
import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from stagecoach.shared.base.local_disk import replacing
from stagecoach.shared.storage.metric_log import ENV_STEPS, EVALUATIONS
from stagecoach.trainer_node.metrics.writers import MetricWriter, WrittenRun

_HEADER_BYTES = 1 << 20
LABELS = {"evaluations": "checkpoint", "episodes": "worker"}
"""Stream → the column of its rows' labels."""


class CsvFile:
    """Table with a column per metric, which is added when it first appears; the cost of a row does not grow."""

    SUFFIX = ".csv"

    def __init__(self, path: Path, env_steps: float, label: str | None = None) -> None:
        """Removes the rows beyond `env_steps`, and a row that a crash cut off, reading backward from the end."""
        self._path, self._label = path, label
        self._columns = [label] if label else []
        if not self._path.exists():
            return
        with self._path.open("r+b") as file:
            header = file.readline(_HEADER_BYTES)
            columns = next(csv.reader([header.decode(errors="replace")]), [])
            if not header.endswith(b"\n") or ENV_STEPS not in columns or (self._label and columns[0] != self._label):
                file.truncate(0)
                return
        self._columns = columns
        place = columns.index(ENV_STEPS)
        _truncate(self._path, len(header), lambda line: float(line.split(b",", place + 1)[place]), env_steps)

    def labels(self) -> set[str]:
        with suppress(FileNotFoundError), self._path.open(newline="") as file:
            return {cells[0] for cells in list(csv.reader(file))[1:]}
        return set()

    def append(self, row: Mapping[str, float], label: str = "") -> None:
        """One row; a name that no row had so far becomes a column, for which the file is copied once."""
        if new := [name for name in row if name not in self._columns]:
            with replacing(self._path) as copy:
                copy.write(_line(self._columns + new))
                with suppress(FileNotFoundError), self._path.open("rb") as file:
                    file.readline()
                    for line in file:  # a row at a time, since there may be millions
                        copy.write(line.rstrip(b"\r\n") + b"," * len(new) + b"\r\n")
            self._columns += new
        cells = [repr(float(row[name])) if name in row else "" for name in self._columns]
        if self._label:
            cells[0] = label
        append_bytes(self._path, _line(cells))


class JsonlFile:
    """A row is an object; what is not finite is null."""

    SUFFIX = ".jsonl"

    def __init__(self, path: Path, env_steps: float, label: str | None = None) -> None:
        self._path, self._label = path, label
        _truncate(path, 0, lambda line: float(json.loads(line)[ENV_STEPS]), env_steps)

    def labels(self) -> set[str]:
        with suppress(FileNotFoundError):
            return {json.loads(line)[self._label] for line in self._path.read_text().splitlines()}
        return set()

    def append(self, row: Mapping[str, float], label: str = "") -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
        named = {self._label: label} if self._label else {}
        append_bytes(self._path, json.dumps(named | finite).encode() + b"\n")


class _TableWriter(MetricWriter):
    """A table for each stream; each evaluation is in its table once, whatever became of the trainer that wrote it."""

    table: type[CsvFile] | type[JsonlFile]

    def __init__(self, run: WrittenRun) -> None:
        super().__init__(run)
        run.needed_folder.mkdir(parents=True, exist_ok=True)
        self._tables: dict[str, CsvFile | JsonlFile] = {}

    def restore(self, evaluations: Sequence[tuple[Mapping[str, float], str]]) -> None:
        known = self._table(EVALUATIONS).labels()
        for row, label in evaluations:
            if label not in known:
                self.write(EVALUATIONS, row, int(row.get(ENV_STEPS, 0)), label)

    def write(self, stream: str, row: Mapping[str, float], step: int, label: str) -> None:
        self._table(stream).append(row, label)

    def _table(self, stream: str) -> CsvFile | JsonlFile:
        if stream not in self._tables:
            path = self.run.needed_folder / f"{stream}{self.table.SUFFIX}"
            until = math.inf if stream == EVALUATIONS else self.run.env_steps
            self._tables[stream] = self.table(path, until, LABELS.get(stream))
        return self._tables[stream]


class CsvWriter(_TableWriter):
    table = CsvFile


class JsonlWriter(_TableWriter):
    table = JsonlFile


def append_bytes(path: Path, data: bytes) -> None:
    """All of it at the end of the file, or nothing."""
    with path.open("ab") as file:
        size = file.tell()
        try:
            file.write(data)
            file.flush()
        except OSError:  # the disk is full: half a row would spoil the next one
            with suppress(OSError):
                file.truncate(size)
            raise


def _truncate(path: Path, begin: int, steps_of: Callable[[bytes], float], env_steps: float) -> None:
    """Ends a file after the last row of at most `env_steps`; rows come in the order of their steps."""
    with suppress(FileNotFoundError), path.open("r+b") as file:
        if file.seek(0, io.SEEK_END) <= begin:
            return
        with mmap.mmap(file.fileno(), 0) as data:
            end = data.rfind(b"\n") + 1
            while end > begin:
                start = data.rfind(b"\n", begin - 1 if begin else 0, end - 1) + 1
                with suppress(IndexError, KeyError, TypeError, ValueError):  # it was cut off, or is no row of ours
                    if steps_of(data[start:end]) <= env_steps:
                        break
                end = start
        file.truncate(max(end, begin))


def _line(fields: Sequence[str]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerow(fields)
    return text.getvalue().encode()
