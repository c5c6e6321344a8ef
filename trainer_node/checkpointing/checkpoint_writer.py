"""Writes checkpoints into the store in the background, by the stages of write_stages.py.

Training does not wait for it, except for the first and the last checkpoint. While the store is away the writer retries
with growing pauses and reports that in `status`; the log keeps what is not durable yet.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Self, cast

from stagecoach.shared.base import world
from stagecoach.shared.base.errors import WaitTimeout
from stagecoach.shared.base.stage_timer import StageTimer
from stagecoach.shared.experience.checkpoint_name import checkpoint_version
from stagecoach.shared.protocol.redis_client import retries
from stagecoach.shared.runtime.run_context import RunContext
from stagecoach.shared.storage.checkpoint_store import CheckpointStore, Pointer
from stagecoach.trainer_node.checkpointing import write_stages
from stagecoach.trainer_node.checkpointing.due_evaluations import DueEvaluations
from stagecoach.trainer_node.checkpointing.fenced_store import FencedStore, LateDeletions
from stagecoach.trainer_node.checkpointing.store_status import StoreStatus
from stagecoach.trainer_node.checkpointing.verification import promote, withdraw
from stagecoach.trainer_node.metrics.recorder import Recorder
from stagecoach.trainer_node.metrics.writers import Orders
from stagecoach.trainer_node.state.snapshot import Snapshot

_LOGGER = logging.getLogger("stagecoach.writer")
_TICK_SECONDS = 0.5


class CheckpointWriter:
    """The thread that writes, and the order of its stages."""

    def __init__(
        self, role: RunContext, store: LateDeletions, recorder: Recorder, redis_process: Callable[[], str]
    ) -> None:  # fmt: skip
        self._role, self.store, self.recorder = role, store, recorder
        self._checkpoints = CheckpointStore(store.fenced, role.run_id)
        self._lock = world.Condition()
        self._pending: Snapshot | None = None
        self._busy = self._closing = False
        self.timer = StageTimer()
        self.failure: BaseException | None = None
        """Error that ended the thread (fenced, damaged store); the trainer raises it."""
        self._status = StoreStatus(role, self._pause)
        self.due = DueEvaluations(store, self._checkpoints, role.config.checkpoint.keep_best)
        self._metrics = write_stages.MetricsStage(role, recorder, self.due)
        self._retention = write_stages.RetentionStage(role, store, self._checkpoints, self.due, self._status)
        self._pointer = write_stages.PointerStage(
            role, store.fenced, self._checkpoints, self._metrics, self._retention, self._status
        )
        archive = write_stages.ArchiveStage(role, store, self._pointer, redis_process)
        self._trim = write_stages.TrimStage(role, store.fenced.epoch, archive)
        objects = write_stages.ObjectsStage(role, self._checkpoints)
        self._stages: tuple[write_stages.Stage, ...] = self._metrics, objects, self._pointer, archive, self._trim
        self._thread = world.Thread(target=self._run, name="writer", daemon=True)

    @classmethod
    def start(
        cls, role: RunContext, began: tuple[int, int, int, int], run_folder: str | None = None,
        redis_process: Callable[[], str] = lambda: "",
    ) -> Self:  # fmt: skip
        """Starts a writer for the trainer that `began` at this epoch, version, env steps and parent's version. Metric
        files need `run_folder` on this machine; `redis_process` is as for `ArchiveStage`."""
        folder = Path(run_folder) / "metrics" if run_folder and Path(run_folder).is_dir() else None
        store = LateDeletions(FencedStore(role.checkpoints.store, role.flow, began[0]))
        recorder = Recorder(role.redis, role.run_id, role.config, folder, store, began, _orders(role))
        writer = cls(role, store, recorder, redis_process)
        writer._thread.start()
        return writer

    @property
    def durable(self) -> int:
        """Newest version with a durable checkpoint of this process; −1 before the first."""
        return -1 if self._status.durable is None else checkpoint_version(self._status.durable) or 0

    @property
    def trimmed(self) -> str:
        return self._trim.trimmed

    def submit(self, snapshot: Snapshot) -> None:
        """Takes over a snapshot; it replaces an older one that still waits for the store."""
        with self._lock:
            self._pending = snapshot
            self._lock.notify_all()

    def wait_idle(self, deadline_seconds: float) -> None:
        """Blocks until all that was submitted is durable; raises `WaitTimeout`, or what ended the thread."""
        deadline = world.monotonic() + deadline_seconds
        with self._lock:
            while (self._pending is not None or self._busy) and self.failure is None:
                if retries(self._role.redis).abandoned:
                    raise WaitTimeout("it ends at once, while the checkpoint was not durable")
                remaining = max(0.0, deadline - world.monotonic())
                if not self._lock.wait(timeout=min(_TICK_SECONDS, remaining)) and world.monotonic() >= deadline:
                    raise WaitTimeout(
                        f"the checkpoint was not durable after {deadline_seconds:g} s; is the store away? "
                        f"{self._status.error}. What is in the log is not lost: `stagecoach resume` reads it again "
                        f"once the store is back"
                    )
        self.raise_failure()

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def close(self, wait_seconds: float = 30.0) -> None:
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self._thread.join(wait_seconds)

    def finish(self, name: str) -> Pointer:
        """Marks `name` as final; call it when the writer is idle."""
        self._pointer.refresh(final=name)
        return cast(Pointer, self._checkpoints.pointer())

    def tidy(self) -> None:
        """Deletes what is no longer needed; call it when the writer is idle."""
        self._retention.tidy()

    def notice_evaluations(self) -> None:
        if self._pointer.evaluated and self._status.attempt(self._pointer.refresh):
            self._retention.tidy()

    def _run(self) -> None:
        try:
            while True:
                with self._lock:
                    if self._pending is None and not self._closing:
                        with self.timer.during("idle"):
                            self._lock.wait(timeout=_TICK_SECONDS)
                    snapshot, self._pending = self._pending, None
                    self._busy = snapshot is not None
                    if snapshot is None and self._closing:
                        break
                if snapshot is not None:
                    self._write(snapshot)
                    with self._lock:
                        self._busy = False
                        self._lock.notify_all()
                else:
                    self.notice_evaluations()
                    if self._metrics.due and self._status.attempt(self._metrics.store):
                        self._retention.tidy()
            self._status.attempt(self._metrics.store)
        except BaseException as error:
            with self._lock:
                self.failure, self._busy = error, False
                self._lock.notify_all()
            _LOGGER.exception("the writer ended")

    def _write(self, snapshot: Snapshot) -> None:
        """Retries until the snapshot is durable, or a newer one waits that covers it."""
        while not self._status.attempt(lambda: self._make_durable(snapshot)):
            with self._lock:
                if self._pending is not None or self._closing:
                    return
        self._run_stage(self._retention, snapshot)

    def _make_durable(self, snapshot: Snapshot) -> None:
        self.store.fenced.ask()
        started = world.monotonic()
        self._status.show_writing(snapshot.name)
        for stage in self._stages:
            self._run_stage(stage, snapshot)
        again, self._status.durable = self._status.durable == snapshot.name, snapshot.name  # due, and the last one
        self.recorder.checkpointed(snapshot.name)
        if not again:
            manifest, seconds = snapshot.checkpoint.manifest, world.monotonic() - started
            text = f"{manifest.name} ({manifest.total_bytes / 1024:.0f} KiB in {seconds:.2f} s)"
            self._role.emit_event("checkpoint", text, name=manifest.name, version=manifest.version)

    def _run_stage(self, stage: write_stages.Stage, snapshot: Snapshot) -> None:
        with self.timer.during(stage.name):
            stage.run(snapshot)

    def _pause(self, seconds: float) -> None:
        with self.timer.during("wait(the store)"), self._lock:
            self._lock.wait_for(lambda: self._closing, timeout=seconds)


def _orders(role: RunContext) -> Orders:
    """A callback's orders, through Redis and the store as from anywhere else."""

    def mark(checkpoint: str | None) -> None:
        withdraw(role.checkpoints) if checkpoint is None else promote(role.checkpoints, checkpoint, live=True)

    return Orders(role.flow.order_stop, role.flow.order_checkpoint, mark)
