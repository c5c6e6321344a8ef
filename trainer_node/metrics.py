"""Metrics of training: one row per update (`UpdateMetrics`), to CSV, TensorBoard and Redis (`MetricWriters`).

They inform. If a writer fails (a full disk, a name that an environment has made up), training continues: the failure
is counted, and told once.
"""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import redis

from shared.config.run_config import Config
from shared.config.sections import MetricsConfig
from shared.datasets.read import read_dataset
from shared.experience.fragment import Fragment
from shared.printable import NAME_CHARACTERS, printable
from shared.protocol.events import emit
from shared.protocol.keys import RunKeys
from shared.protocol.scripts import write_small
from shared.storage.local_disk import replacing
from trainer_node.learning.learner import Learner
from trainer_node.learning.off_policy_evaluation import DataEvaluation

_LOGGER = logging.getLogger("stagecoach.trainer")
_ENV_STEPS = "time/env_steps"
_MOST_METRICS = 1000
"""Names that one process writes; an environment may make up a new one in each episode."""
_HEADER_BYTES = 1 << 20
_SMOOTHING = 0.9


class UpdateMetrics:
    """Collects one row of metrics per update; only its clocks outlive a row."""

    def __init__(self, config: Config) -> None:
        self._from_data = DataEvaluation(config, read_dataset)
        self.learning_seconds = 0.0
        self._last = time.monotonic()
        self._fps = 0.0

    def row(
        self, learner: Learner, fragments: list[Fragment], metrics: Mapping[str, float], version: int,
        waited: Mapping[str, float],
    ) -> dict[str, float]:  # fmt: skip
        train, now = learner.counters.train, time.monotonic()
        speed = sum(item.header.transitions for item in fragments) / max(now - self._last, 1e-9)
        self._fps = speed if not self._fps else _SMOOTHING * self._fps + (1 - _SMOOTHING) * speed
        self._last = now
        lags = [version - 1 - item.header.version for item in fragments]
        row: dict[str, float] = {
            _ENV_STEPS: train.env_steps,
            "time/episodes": train.episodes,
            "time/fps": self._fps,
            "train/updates": train.updates,
            "train/learn_seconds": self.learning_seconds,
            "policy/version": version,
            "policy/lag_mean": float(np.mean(lags)),
            "policy/lag_max": float(max(lags)),
            "rollout/acting_seconds": float(np.mean([item.header.acting_seconds for item in fragments])),
        }
        records = list(learner.episodes)
        values: dict[str, list[Any]] = {
            "rollout/ep_rew_mean": [record.episode_return for record in records],
            "rollout/ep_len_mean": [record.length for record in records],
            "rollout/success_rate": [record.success for record in records if record.success is not None],
        }
        for name in sorted({name for record in records for name in record.metrics}):
            values[f"environment/{name}"] = [item.metrics[name] for item in records if name in item.metrics]
        row |= {name: float(np.mean(found)) for name, found in values.items() if found}
        row |= {f"wait/{name.replace(' ', '_')}_seconds": seconds for name, seconds in waited.items()}
        for policy in learner.policies.values():  # a dataset is that of one
            row |= self._from_data.figures(policy, train.updates)
        return row | dict(metrics)


class MetricWriters:
    """Writes one row of metrics per published version; none of it raises."""

    def __init__(
        self, client: redis.Redis, run_id: str, config: MetricsConfig, folder: Path | None, env_steps: int
    ) -> None:
        """Opens the files; rows beyond `env_steps` are of a future that a restart has undone, and are removed."""
        self._redis, self._keys = client, RunKeys(run_id)
        self._names: set[str] = set()
        self.failures: Counter[str] = Counter()
        """By writer, the rows that it could not write."""
        self._writers: dict[str, Callable[[Mapping[str, float], int], None]] = {"Redis": self._to_redis}
        if folder is not None and config.csv:
            table = CsvFile(folder / "train.csv")
            with self._continuing("train.csv"):
                table.start(env_steps)
            self._writers["train.csv"] = lambda row, _: table.append(row)
        if folder is not None and config.tensorboard:
            self._writers["TensorBoard"] = TensorBoardFile(folder / "tensorboard", env_steps + 1).append

    def write(self, metrics: Mapping[str, float], env_steps: int) -> None:
        row: dict[str, float] = {}
        with self._continuing("the metrics"):
            row = self._row(metrics)
        for name, append in self._writers.items():
            with self._continuing(name):
                append(row, env_steps)

    def _to_redis(self, row: Mapping[str, float], env_steps: int) -> None:
        shown = json.dumps({name: value if math.isfinite(value) else None for name, value in row.items()})
        write_small(self._redis, self._keys, self._keys.metrics, "SET", shown)

    def _row(self, metrics: Mapping[str, float]) -> dict[str, float]:
        row = {printable(name, NAME_CHARACTERS): float(value) for name, value in metrics.items()}
        new = [name for name in row if name not in self._names]
        left = _MOST_METRICS - len(self._names)
        self._names.update(new[:left])
        for name in new[left:]:
            del row[name]
        if new[left:]:
            self._failed("the metrics", f"there are more than {_MOST_METRICS} names, {new[left]!r} is left out")
        return row

    @contextmanager
    def _continuing(self, writer: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever it is, no metric is worth a run
            self._failed(writer, f"{type(error).__name__}: {error}")

    def _failed(self, writer: str, why: str) -> None:
        self.failures[writer] += 1
        if self.failures[writer] == 1:
            text = f"{writer} cannot be written, training continues: {why}"
            _LOGGER.warning("%s", text)
            emit(self._redis, self._keys.run_id, "metrics", text)


class CsvFile:
    """`train.csv`: a row per update, at its end; what it costs does not depend on how many there are."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns: list[str] = []

    def start(self, env_steps: int) -> None:
        """Removes the rows beyond `env_steps`, and one that a crash cut off, reading backward from the end."""
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
        if new := [name for name in row if name not in self._columns]:
            with replacing(self._path) as copy:
                copy.write(_line(self._columns + new))
                with suppress(FileNotFoundError), self._path.open("rb") as file:
                    file.readline()
                    for line in file:  # a row at a time, since there may be millions
                        copy.write(line.rstrip(b"\r\n") + b"," * len(new) + b"\r\n")
            self._columns += new
        _append(self._path, _line([repr(float(row[name])) if name in row else "" for name in self._columns]))


class TensorBoardFile:
    """What TensorBoard reads, with a row in each event: that costs a tenth of an event for each metric.

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
            return record(step=step, summary=Summary(value=[Summary.Value(tag=k, simple_value=row[k]) for k in row]))

        self._path = folder / f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._event = event
        self._header = record(step=purge_step, file_version="brain.Event:2")
        self._header += record(step=purge_step, session_log=SessionLog(status=SessionLog.START))

    def append(self, row: Mapping[str, float], env_steps: int) -> None:
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
