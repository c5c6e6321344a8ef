"""What TensorBoard reads: scalars, histograms, the config as text and as hyperparameters."""

import io
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from shared.config.section import leaves
from shared.storage.metric_log import ENV_STEPS, EVALUATIONS, TRAIN, UNIX_TIME, VERSION
from trainer_node.metrics.table_files import append_bytes
from trainer_node.metrics.writers import MetricWriter, WrittenRun

_SHORT = 100
"""Bytes: an event that begins a file is shorter."""
SCORE = "eval/ep_rew_mean"
"""By which TensorBoard's table of hyperparameters compares runs."""


class TensorBoardWriter(MetricWriter):
    """Rows are in `metrics/tensorboard` in the run's folder, or in `folder`."""

    def __init__(self, run: WrittenRun, folder: str | None = None) -> None:
        super().__init__(run)
        self._file = TensorBoardFile(Path(folder) if folder else run.needed_folder / "tensorboard", run.env_steps + 1)
        if not run.env_steps:
            self._file.text("config", f"```yaml\n{yaml.safe_dump(dict(run.config), sort_keys=False)}```", 0)
            self._file.hyperparameters(leaves(dict(run.config)), SCORE)

    def restore(self, evaluations: Sequence[tuple[Mapping[str, float], str]]) -> None:
        shown = self._file.shown(SCORE)
        for row, label in evaluations:
            if (int(row[ENV_STEPS]), row[VERSION]) not in shown:
                self.write(EVALUATIONS, row, int(row[ENV_STEPS]), label)

    def write(self, stream: str, row: Mapping[str, float], step: int, label: str) -> None:
        if stream in (TRAIN, EVALUATIONS):
            self._file.scalars(row, step, row.get(UNIX_TIME))

    def histogram(self, name: str, values: Sequence[float], step: int) -> None:
        self._file.histogram(name, values, step)


class TensorBoardFile:
    """An event file. A row is one event: that costs a tenth of an event for each metric.

    TensorBoard's own writer has a thread that a full disk ends for good; here each row is tried for itself.
    """

    def __init__(self, folder: Path, purge_step: int) -> None:
        """What former files hold from `purge_step` on is not shown any more."""
        from tensorboard.compat.proto.event_pb2 import SessionLog  # takes a while, and is not always wanted

        self._purge_step = purge_step
        self._path = folder / f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._header = _record(step=purge_step, file_version="brain.Event:2")
        self._header += _record(step=purge_step, session_log=SessionLog(status=SessionLog.START))

    def shown(self, metric: str) -> set[tuple[int, float]]:
        """Step and policy version of each row with this metric that this file or former ones show."""
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        found = set[tuple[int, float]]()
        for path in sorted(self._path.parent.glob("events.out.tfevents.*")):
            for record in RawEventFileLoader(str(path)).Load():  # not what was cut off
                if metric.encode() in record:
                    event = Event.FromString(record)
                    values = {value.tag: value.simple_value for value in event.summary.value}
                    found |= {(event.step, values[VERSION])} if metric in values else set()
                elif (
                    len(record) < _SHORT and (event := Event.FromString(record)).session_log.status == SessionLog.START
                ):
                    found = {(step, version) for step, version in found if step < event.step}
        first = not self._header  # else it hides what former files hold as it writes its first row
        return found if first else {(step, version) for step, version in found if step < self._purge_step}

    def scalars(self, row: Mapping[str, float], step: int, wall_time: float | None = None) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in row.items()]
        self._append(Summary(value=values), step, wall_time)

    def text(self, name: str, text: str, step: int) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._append(text_pb(name, text), step)

    def histogram(self, name: str, values: Sequence[float], step: int) -> None:
        from tensorboard.plugins.histogram.summary_v2 import histogram_pb

        self._append(histogram_pb(name, np.asarray(values, np.float64)), step)

    def hyperparameters(self, config: Mapping[str, Any], metric: str) -> None:
        from tensorboard.plugins.hparams.summary_v2 import Metric, hparams_config_pb, hparams_pb

        plain = {name: value if isinstance(value, int | float | str) else str(value) for name, value in config.items()}
        self._append(hparams_config_pb(hparams=[], metrics=[Metric(metric)]), 0)
        self._append(hparams_pb(plain), 0)

    def _append(self, summary: Any, step: int, wall_time: float | None = None) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        append_bytes(self._path, self._header + _record(wall_time, step=step, summary=summary))
        self._header = b""


def _record(wall_time: float | None = None, **what: Any) -> bytes:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    data = io.BytesIO()
    event = Event(wall_time=time.time() if wall_time is None else wall_time, **what)
    RecordWriter(data).write(event.SerializeToString())
    return data.getvalue()
