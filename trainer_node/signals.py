"""Signals: the run's figures under the field's names, to CSV, TensorBoard, and Redis (for the console and `status`)."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import redis

from shared.config import SignalsConfig
from shared.redis_keys import RunKeys
from shared.scripts import write_small

_STEP = "train/updates"


class Signals:
    """Writes one row of figures per published version."""

    def __init__(self, client: redis.Redis, run_id: str, config: SignalsConfig, folder: Path | None) -> None:
        self._redis = client
        self._keys = RunKeys(run_id)
        self._csv = folder / "train.csv" if folder is not None and config.csv else None
        self._board = folder / "tensorboard" if folder is not None and config.tensorboard else None
        self._columns: list[str] = []
        self._writer: Any = None
        self._summary: Callable[[Mapping[str, float]], Any]
        """A row as TensorBoard has it: one event with all figures costs a tenth of one for each."""

    def start(self, env_steps: int) -> None:
        """Opens the files; rows beyond `env_steps` are of a future that a restart has undone, and go."""
        if self._csv is not None:
            self._csv.parent.mkdir(parents=True, exist_ok=True)
            rows = _read(self._csv)
            kept = [row for row in rows if float(row["time/env_steps"]) <= env_steps]
            self._columns = list(rows[0]) if rows else []
            self._rewrite(kept)
        if self._board is not None:
            from tensorboard.compat.proto.summary_pb2 import Summary  # takes a second, and is not always wanted
            from torch.utils.tensorboard import SummaryWriter

            self._summary = lambda row: Summary(value=[Summary.Value(tag=name, simple_value=row[name]) for name in row])
            self._writer = SummaryWriter(str(self._board), purge_step=env_steps + 1)

    def write(self, figures: Mapping[str, float], env_steps: int) -> None:
        """One row."""
        row = {name: float(value) for name, value in figures.items()}
        shown = json.dumps({name: value if math.isfinite(value) else None for name, value in row.items()})
        write_small(self._redis, self._keys.flow, self._keys.signals, "SET", shown)
        if self._csv is not None:
            new = [name for name in row if name not in self._columns]
            if new:
                self._columns += new
                self._rewrite(_read(self._csv))
            with self._csv.open("a", newline="") as file:
                csv.DictWriter(file, self._columns, restval="").writerow(row)
        if self._writer is not None:
            self._writer.file_writer.add_summary(self._summary(row), env_steps)

    def close(self) -> None:
        """Flushes what is buffered."""
        if self._writer is not None:
            self._writer.close()

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        assert self._csv is not None
        if not self._columns:
            return
        temporary = self._csv.with_suffix(".partial")
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns, restval="")
            writer.writeheader()
            writer.writerows(rows)
        temporary.replace(self._csv)


def _read(path: Path) -> list[dict[str, str]]:
    """Complete rows only: a crash may have cut the last one."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if None not in row.values() and row.get("time/env_steps")]
