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


class _TableWriter(MetricWriter):
    """An evaluation is in its table once, whatever became of the trainer that wrote it."""

    def __init__(self, run: WrittenRun) -> None:
        super().__init__(run)
        run.needed_folder.mkdir(parents=True, exist_ok=True)

    def restore(self, evaluations: Sequence[tuple[Mapping[str, float], str]]) -> None:
        known = self._labels()
        for row, label in evaluations:
            if label not in known:
                self.write(EVALUATIONS, row, int(row.get(ENV_STEPS, 0)), label)

    def _labels(self) -> set[str]:
        """Labels of the evaluations in the table."""
        raise NotImplementedError


class CsvWriter(_TableWriter):
    """A column per metric; one that appears later gets its column then."""

    def __init__(self, run: WrittenRun) -> None:
        super().__init__(run)
        self._tables: dict[str, CsvFile] = {}

    def write(self, stream: str, row: Mapping[str, float], step: int, label: str) -> None:
        self._table(stream).append(row, label)

    def _table(self, stream: str) -> CsvFile:
        if stream not in self._tables:
            path, env_steps = self.run.needed_folder / f"{stream}.csv", self.run.env_steps
            self._tables[stream] = CsvFile(path, math.inf if stream == EVALUATIONS else env_steps, LABELS.get(stream))
        return self._tables[stream]

    def _labels(self) -> set[str]:
        return self._table(EVALUATIONS).labels()


class JsonlWriter(_TableWriter):
    """A row is an object; what is not finite is null."""

    def __init__(self, run: WrittenRun) -> None:
        super().__init__(run)
        self._started: set[str] = set()

    def write(self, stream: str, row: Mapping[str, float], step: int, label: str) -> None:
        path = self._path(stream)
        finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
        named = {LABELS[stream]: label} if stream in LABELS else {}
        append_bytes(path, json.dumps(named | finite).encode() + b"\n")

    def _path(self, stream: str) -> Path:
        path = self.run.needed_folder / f"{stream}.jsonl"
        if stream not in self._started:
            until = math.inf if stream == EVALUATIONS else self.run.env_steps
            _truncate(path, 0, lambda line: float(json.loads(line)[ENV_STEPS]), until)
            self._started.add(stream)
        return path

    def _labels(self) -> set[str]:
        path = self._path(EVALUATIONS)
        lines = path.read_text().splitlines() if path.exists() else []
        return {json.loads(line)[LABELS[EVALUATIONS]] for line in lines}


class CsvFile:
    """A row at its end; what that costs does not depend on how many there are."""

    def __init__(self, path: Path, env_steps: float, label: str | None = None) -> None:
        """Removes the rows beyond `env_steps`, and one that a crash cut off, reading backward from the end."""
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
