"""TensorBoard event files: scalars, histograms, the config as text and as hyperparameters."""

import io
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from stagecoach.shared.base import world
from stagecoach.shared.config.schema.section import leaves
from stagecoach.shared.storage.metric_log import ENV_STEPS, EVALUATIONS, TRAIN, UNIX_TIME, VERSION
from stagecoach.trainer_node.metrics.table_files import append_bytes
from stagecoach.trainer_node.metrics.writers import MetricWriter, WrittenRun

_SHORT = 100
"""Bytes: an event that begins a file is shorter."""
SCORE = "eval/ep_rew_mean"
"""Metrics by which TensorBoard's table of hyperparameters compares runs."""


class TensorBoardWriter(MetricWriter):
    """An event file in `metrics/tensorboard` in the run's folder, or in `folder`. A row is one event, at a tenth of the
    cost of an event for each metric.

    TensorBoard's own writer has a thread that a full disk ends for good; here each row is tried for itself.
    """

    def __init__(self, run: WrittenRun, folder: str | None = None) -> None:
        """Hides what earlier files hold beyond the run's env steps."""
        super().__init__(run)
        from tensorboard.compat.proto.event_pb2 import SessionLog  # takes a while, and is not always wanted

        place = Path(folder) if folder else run.needed_folder / "tensorboard"
        self._path = place / f"events.out.tfevents.{world.unix_time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._purge_step = run.env_steps + 1
        self._header = _record(step=self._purge_step, file_version="brain.Event:2")
        self._header += _record(step=self._purge_step, session_log=SessionLog(status=SessionLog.START))
        if not run.env_steps:
            self._show_config(dict(run.config))

    def restore(self, evaluations: Sequence[tuple[Mapping[str, float], str]]) -> None:
        shown = self.shown()
        for row, label in evaluations:
            if (int(row[ENV_STEPS]), row[VERSION]) not in shown:
                self.write(EVALUATIONS, row, int(row[ENV_STEPS]), label)

    def write(self, stream: str, row: Mapping[str, float], step: int, label: str) -> None:
        if stream in (TRAIN, EVALUATIONS):
            from tensorboard.compat.proto.summary_pb2 import Summary

            values = [Summary.Value(tag=name, simple_value=value) for name, value in row.items()]
            self._append(Summary(value=values), step, row.get(UNIX_TIME))

    def histogram(self, name: str, values: Sequence[float], step: int) -> None:
        from tensorboard.plugins.histogram.summary_v2 import histogram_pb

        self._append(histogram_pb(name, np.asarray(values, np.float64)), step)

    def shown(self) -> set[tuple[int, float]]:
        """Step and policy version of each evaluation that this file or earlier files show."""
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        found = set[tuple[int, float]]()
        for path in sorted(self._path.parent.glob("events.out.tfevents.*")):
            for record in RawEventFileLoader(str(path)).Load():  # not what was cut off
                if SCORE.encode() in record:
                    event = Event.FromString(record)
                    values = {value.tag: value.simple_value for value in event.summary.value}
                    found |= {(event.step, values[VERSION])} if SCORE in values else set()
                elif (
                    len(record) < _SHORT and (event := Event.FromString(record)).session_log.status == SessionLog.START
                ):
                    found = {(step, version) for step, version in found if step < event.step}
        first = not self._header  # else it hides what former files hold as it writes its first row
        return found if first else {(step, version) for step, version in found if step < self._purge_step}

    def _show_config(self, config: dict[str, Any]) -> None:
        from tensorboard.plugins.hparams.summary_v2 import Metric, hparams_config_pb, hparams_pb
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._append(text_pb("config", f"```yaml\n{yaml.safe_dump(config, sort_keys=False)}```"), 0)
        values = leaves(config).items()
        plain = {name: value if isinstance(value, int | float | str) else str(value) for name, value in values}
        self._append(hparams_config_pb(hparams=[], metrics=[Metric(SCORE)]), 0)
        self._append(hparams_pb(plain), 0)

    def _append(self, summary: Any, step: int, wall_time: float | None = None) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        append_bytes(self._path, self._header + _record(wall_time, step=step, summary=summary))
        self._header = b""


def _record(wall_time: float | None = None, **what: Any) -> bytes:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    data = io.BytesIO()
    event = Event(wall_time=world.unix_time() if wall_time is None else wall_time, **what)
    RecordWriter(data).write(event.SerializeToString())
    return data.getvalue()
