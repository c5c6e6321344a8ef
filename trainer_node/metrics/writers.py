"""Base classes of metric writers, and the built-in writers by name; a custom writer is `module:Class`.

Each has a thread of its own, so that one which is slow, or hangs, holds up no other.
"""

import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from stagecoach.shared.base import world
from stagecoach.shared.base.errors import ConfigError, UserError
from stagecoach.shared.base.printable import counted
from stagecoach.shared.base.user_code import import_class, misfit, with_extra
from stagecoach.shared.config.sections import MetricsConfig
from stagecoach.shared.storage.metric_log import EVALUATIONS, TRAIN

WRITERS = {
    "csv": "stagecoach.trainer_node.metrics.table_files:CsvWriter",
    "jsonl": "stagecoach.trainer_node.metrics.table_files:JsonlWriter",
    "tensorboard": "stagecoach.trainer_node.metrics.tensorboard_writer:TensorBoardWriter",
    "wandb": "stagecoach.trainer_node.metrics.trackers:WandbWriter",
    "mlflow": "stagecoach.trainer_node.metrics.trackers:MlflowWriter",
    "trackio": "stagecoach.trainer_node.metrics.trackers:TrackioWriter",
}


class Orders(NamedTuple):
    """A person's orders to a live run, each of which returns once it is recorded."""

    stop: Callable[[], object]
    checkpoint: Callable[[], object]
    promote: Callable[[str | None], object]


@dataclass(frozen=True)
class WrittenRun:
    """The run whose metrics are written; a writer may give it a person's orders.

    Orders take the way of `stagecoach stop` and the like, at no set point of the training: what is learned up to a
    version does not depend on them.
    """

    run_id: str
    folder: Path | None
    """`metrics/` in the run's folder; None where the trainer has no such folder."""
    config: Mapping[str, Any]
    """The resolved config, as plain data."""
    env_steps: int = 0
    """Env steps at which this trainer begins; earlier trainers' rows beyond are void."""
    orders: Orders | None = None

    def stop(self) -> None:
        """Orders the end of the run with a final checkpoint; without effect once it ends."""
        self._orders().stop()

    def checkpoint(self) -> None:
        """Orders a checkpoint after the current update."""
        self._orders().checkpoint()

    def promote(self, checkpoint: str | None) -> None:
        """Marks a checkpoint (a name, or `best`, `latest`) for deployment; None clears the mark.

        Raises `CheckpointNotFound` or `CheckpointDamaged`, which an event then reports.
        """
        self._orders().promote(checkpoint)

    def _orders(self) -> Orders:
        if self.orders is None:
            raise UserError(f"no trainer of run {self.run_id!r} takes orders here")
        return self.orders

    @property
    def needed_folder(self) -> Path:
        """Folder of the run; raises `ConfigError` if the trainer has no such folder."""
        if self.folder is None:
            raise ConfigError("the trainer has no folder of the run; `stagecoach metrics RUN` makes files of its store")
        return self.folder


class MetricWriter:
    """Base of all writers. The first error of its methods is reported as an event; training continues.

    All methods are called by one thread of the writer's own, in the order of the rows. `stream` is `train`,
    `evaluations`, `episodes` or `fleet`; `step` the env steps trained on.
    """

    PACKAGES: tuple[str, ...] = ()
    """Modules that have to be installed for it; without them no run begins."""

    def __init__(self, run: WrittenRun) -> None:
        """A writer may take keyword arguments of its own: `metrics.writers: [{path: wandb, kwargs: {project: x}}]`."""
        self.run = run

    def write(self, stream: str, row: Mapping[str, float], step: int, label: str) -> None:
        """One row: metrics by name; `label` is an evaluation's checkpoint, or the worker of an episode."""
        raise NotImplementedError

    def restore(self, evaluations: Sequence[tuple[Mapping[str, float], str]]) -> None:
        """Rows and labels of all evaluations that former trainers have recorded, before the first new one: for writers
        that can detect which of these they lack."""

    def histogram(self, name: str, values: Sequence[float], step: int) -> None:
        """The values behind a mean, for writers that show distributions."""

    def checkpoint(self, name: str, step: int) -> None:
        """A checkpoint is durable."""

    def flush(self) -> None:
        """Makes what was written visible to others; called before each checkpoint is stored."""

    def close(self) -> None:
        """Called once, at the end."""


class Callback(MetricWriter):
    """Base of callbacks: a writer with a method for each kind of event. It cannot change what is learned: rows are
    copies, and the calls come from another thread than training. It may order what a person may: `self.run.stop()`,
    `self.run.checkpoint()`, `self.run.promote(name)`."""

    def write(self, stream: str, row: Mapping[str, float], step: int, label: str) -> None:
        if stream == TRAIN:
            self.on_update(dict(row), step)
        elif stream == EVALUATIONS:
            self.on_evaluation(label, dict(row), step)

    def checkpoint(self, name: str, step: int) -> None:
        self.on_checkpoint(name, step)

    def on_update(self, row: dict[str, float], env_steps: int) -> None:
        """The metrics of one row (`metrics.every`)."""

    def on_evaluation(self, checkpoint: str, row: dict[str, float], env_steps: int) -> None:
        """The scores of a checkpoint, or of a policy that was due by `evaluation.every`."""

    def on_checkpoint(self, name: str, env_steps: int) -> None:
        """A checkpoint is durable."""


def writer_class(path: str) -> type[MetricWriter]:
    """Returns the class of a built-in writer or of `module:Class`; raises `ConfigError`."""
    if ":" not in path and path not in WRITERS:
        raise ConfigError(f"metrics.writers={path}: expected {', '.join(WRITERS)}, or package.module:Class")
    return import_class(WRITERS.get(path, path), "metrics.writers", MetricWriter)


def open_writer(path: str, kwargs: Mapping[str, Any], run: WrittenRun) -> MetricWriter:
    return writer_class(path)(run, **kwargs)


def check_writers(config: MetricsConfig, here: bool = True) -> None:
    """Raises `ConfigError` for a writer that cannot be imported, does not take its arguments, or (where the trainer is
    to run `here`) needs a package that is not installed."""
    for writer in config.writers:
        made = writer_class(writer.path)
        if why := misfit(made, None, **writer.kwargs):
            raise ConfigError(f"metrics.writers={writer.path} does not take {writer.kwargs}: {why}")
        for package in made.PACKAGES if here else ():
            if find_spec(package) is None:
                raise ConfigError(f"metrics.writers={writer.path}: " + with_extra(f"No module named '{package}'"))


class WriterThread:
    """Opens a writer and passes calls on in order; reports what it raises by `failed`."""

    def __init__(
        self, name: str, opens: Callable[[], Any], failed: Callable[[str, str], None], slow: Callable[[str, str], None],
        most: int,
    ) -> None:  # fmt: skip
        """`failed` and `slow` take the writer's name and why; `most` calls wait for it, more are left out."""
        self.name, self._opens, self._failed, self._slow = name, opens, failed, slow
        self._queue: world.Queue[tuple[str, tuple[Any, ...]]] = world.Queue(most)
        self._flushed, self._overdue = world.Event(), False
        self._flushed.set()
        self._thread = world.Thread(target=self._run, name=f"metrics: {name}", daemon=True)
        self._thread.start()

    def put(self, method: str, *arguments: Any) -> bool:
        """Calls a method of the writer, later; whether it will be."""
        try:
            self._queue.put_nowait((method, arguments))
        except queue.Full:
            self._failed(self.name, f"{self._queue.maxsize} rows wait for it; the newest are left out")
            return False
        return True

    def flush(self) -> None:
        self._overdue = not self._flushed.is_set()
        self.put("flush")
        if not self._overdue and self.put("flushed", flushed := world.Event()):
            self._flushed = flushed

    def wait_flushed(self, until: float) -> None:
        """Waits for the last `flush` until then (monotonic clock); not for one that was late before and still is."""
        if not self._overdue and not self._flushed.wait(max(0.0, until - world.monotonic())):
            self._slow(self.name, "it is still busy; checkpoints and other writers go ahead")

    def join(self, seconds: float) -> None:
        """Waits for its end after `close` was put; reports the calls that are still queued."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            left = counted(self._queue.qsize(), "call")
            self._slow(self.name, f"{left} to it are still waiting as the trainer ends; their rows are in the store")

    def _run(self) -> None:
        writer = self._try(self._opens)
        method = ""
        while method != "close":
            method, arguments = self._queue.get()
            if method == "flushed":
                arguments[0].set()
            elif writer is not None:
                self._try(getattr(writer, method), *arguments)

    def _try(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except (Exception, SystemExit) as error:  # whatever it is, no metric is worth a run
            self._failed(self.name, f"{type(error).__name__}: {error}")
            return None
