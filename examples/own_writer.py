"""A metric writer of your own, for a SQLite file: `metrics: {writers: [csv, own_writer:SqliteWriter]}`."""

import sqlite3
from collections.abc import Mapping
from pathlib import Path

import stagecoach as sc


class SqliteWriter(sc.MetricWriter):
    """Writes a line for each metric of each row into `metrics.sqlite` in the run's folder, or into `file`."""

    def __init__(self, run: sc.WrittenRun, file: str = "", streams: tuple[str, ...] = ("train", "evaluations")) -> None:
        super().__init__(run)
        self.streams = streams
        self.file = Path(file) if file else run.needed_folder / "metrics.sqlite"
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.database = sqlite3.connect(self.file, check_same_thread=False)  # one thread at a time calls a writer
        self.database.execute("CREATE TABLE IF NOT EXISTS metrics (run, stream, step, label, name, value)")
        # rows beyond the checkpoint from which this trainer continues come once more
        self.database.execute("DELETE FROM metrics WHERE run = ? AND step > ?", (run.run_id, run.env_steps))

    def write(self, stream: str, row: Mapping[str, float], step: int, label: str) -> None:
        if stream in self.streams:
            lines = [(self.run.run_id, stream, step, label, name, value) for name, value in row.items()]
            self.database.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?, ?, ?)", lines)

    def flush(self) -> None:
        """Called before each checkpoint."""
        self.database.commit()

    def close(self) -> None:
        self.database.commit()
        self.database.close()
