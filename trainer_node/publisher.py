"""The publisher: checkpoints into the store in the background, then pointer, status, pruning, and the log's trim.

Order for each: objects → verify → manifest → pointer → status → prune → archive → trim. Training never waits for it
(except for the first and the last checkpoint). While the store is away it tries again without end, with growing pauses,
says so in `status`, and the log keeps what is not yet durable. Before each write the epoch is checked, so that a
trainer that was replaced writes nothing.
"""

from __future__ import annotations

import functools
import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from shared.archive import Archive
from shared.checkpoint import READY, CheckpointStore, Manifest, Pointer, checkpoint_version
from shared.connection import abandoned
from shared.errors import (
    CheckpointDamaged,
    Fenced,
    ShardUnavailable,
    StoreError,
    StoreUnavailable,
    WaitTimeout,
)
from shared.events import emit, prune_evaluations, read_evaluations
from shared.heartbeat import growing_pauses, read_heartbeats
from shared.ledger import read_books
from shared.printable import counted
from shared.redis_keys import RunKeys
from shared.role import Role
from shared.scripts import write_small
from shared.stages import Stages
from trainer_node.archiver import Archiver
from trainer_node.exporter import Exporter
from trainer_node.fenced_store import FencedStore
from trainer_node.retention import Stock, best_checkpoints, memory_from, prune, status_entries, take_stock
from trainer_node.snapshot import Snapshot

_LOGGER = logging.getLogger("stagecoach.publisher")
_TICK_SECONDS = 0.5
_TOLD = ("mean_return", "episodes")
"""What a manifest tells of the newest evaluation."""


class Publisher:
    """Owns everything that the trainer writes into the store."""

    def __init__(self, role: Role, epoch: int) -> None:
        self._role = role
        self._epoch = epoch
        self._store = FencedStore(role.checkpoints.store, role.flow, epoch)
        self._checkpoints = CheckpointStore(self._store, role.run_id)
        self._log = role.log()
        archive = Archive(self._store, role.run_id)
        self._archiver = Archiver(archive, self._log, role.config.archive)
        self._exporter = Exporter(role, self._checkpoints)
        self._lock = threading.Condition()
        self._pending: Snapshot | None = None
        self._busy = False
        self._closing = False
        self._noticed: dict[str, dict[str, Any]] = {}
        """The evaluations that pointer and status file reflect."""
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._durable: str | None = None
        self._trouble: dict[str, Any] = {}
        """What the last try met, since when, and how many have failed; empty while the store works."""
        self._pauses = growing_pauses()
        self.stages = Stages()
        """Of the background thread."""
        self.failure: BaseException | None = None
        """What ended the background thread (fenced, damaged store); the trainer raises it."""

    def start(self) -> None:
        """Begins to work in the background."""
        self._thread.start()

    @property
    def struggling(self) -> bool:
        """Whether the last try to write into the store failed."""
        return bool(self._trouble)

    def submit(self, snapshot: Snapshot) -> None:
        """Takes over a snapshot; one that still waits for the store is replaced by it, being older."""
        with self._lock:
            self._pending = snapshot
            self._lock.notify_all()

    def wait_idle(self, deadline_seconds: float) -> None:
        """Until all submitted is durable; raises `WaitTimeout`, or what went wrong."""
        deadline = time.monotonic() + deadline_seconds
        with self._lock:
            while (self._pending is not None or self._busy) and self.failure is None:
                if abandoned(self._role.redis):
                    raise WaitTimeout("it ends at once, while the checkpoint was not durable")
                remaining = max(0.0, deadline - time.monotonic())
                if not self._lock.wait(timeout=min(_TICK_SECONDS, remaining)) and time.monotonic() > deadline:
                    raise WaitTimeout(
                        f"the checkpoint was not durable after {deadline_seconds:g} s; is the store away? "
                        f"{self._trouble.get('error', 'It has not answered yet')}. What is in the log is not lost: "
                        f"`stagecoach resume` reads it again once the store is back"
                    )
        if self.failure is not None:
            raise self.failure

    @property
    def exports(self) -> bool:
        """Whether checkpoints are exported."""
        return self._exporter.on

    def exported(self) -> bool:
        """As the run ends: whether what the pointer names has been exported, or has failed to be."""
        self._exporter.ending = True
        return self._exporter.settled or self.failure is not None

    def close(self) -> None:
        """Ends the background thread after what it is doing."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self._thread.join(timeout=30)

    def finish(self, name: str) -> Pointer:
        """Marks `name` as final; call when idle."""
        self._refresh(final=name)
        pointer = self._checkpoints.pointer()
        assert pointer is not None
        return pointer

    def _run(self) -> None:
        try:
            while True:
                with self._lock:
                    if self._pending is None and not self._closing:
                        with self.stages.during("idle"):
                            self._lock.wait(timeout=_TICK_SECONDS)
                    snapshot, self._pending = self._pending, None
                    self._busy = snapshot is not None
                    if snapshot is None and self._closing:
                        return
                if snapshot is not None:
                    self._until_durable(snapshot)
                    with self._lock:
                        self._busy = False
                        self._lock.notify_all()
                else:
                    self._notice_evaluations()
                if self._exporter.due and not self._try(self._exporter.step):
                    self._pause()
        except BaseException as error:
            with self._lock:
                self.failure, self._busy = error, False
                self._lock.notify_all()
            _LOGGER.exception("the publisher ended")
        finally:
            self._exporter.close()

    def _notice_evaluations(self) -> None:
        """A new score may make another checkpoint the best one."""
        if read_evaluations(self._role.redis, self._role.run_id) != self._noticed and not self._try(self._refresh):
            self._pause()

    def _until_durable(self, snapshot: Snapshot) -> None:
        """Tries until it is in the store, or a newer snapshot waits that covers it.

        Each try writes the same manifest: the store may carry out a put that was given up after the next one.
        """
        manifest = functools.cache(lambda: self._with_news(snapshot.manifest))
        while not self._try(lambda: self._save(manifest(), snapshot.objects)):
            with self.stages.during("wait(the store)"):
                self._pause()
            with self._lock:
                if self._pending is not None or self._closing:
                    return

    def _try(self, write: Callable[[], object]) -> bool:
        """One try (of several by boto3); whether it worked. Where not, `status` and an event say why."""
        try:
            write()
        except (StoreError, StoreUnavailable, ShardUnavailable) as error:
            attempts = self._trouble.get("attempts", 0) + 1
            since = self._trouble.get("since", round(time.time(), 3))
            who = "a Redis shard" if isinstance(error, ShardUnavailable) else "the store"
            self._trouble = {"waiting_for": who, "since": since, "attempts": attempts, "error": str(error)}
            _LOGGER.warning("%s fails (try %d): %s", who, attempts, error)
            self._say(self._trouble)
            if attempts == 1:
                emit(self._role.redis, self._role.run_id, "store", f"{who} fails, training goes on: {error}")
            return False
        if self._trouble:
            seconds, attempts = time.time() - self._trouble["since"], self._trouble["attempts"]
            often = f"it failed {counted(attempts, 'time')} in {max(0.0, seconds):.0f} s"
            text = f"{self._trouble['waiting_for']} is back: {often}"
            self._trouble, self._pauses = {}, growing_pauses()
            emit(self._role.redis, self._role.run_id, "store", text)
        self._say({})
        return True

    def _pause(self) -> None:
        """Before the next try; a newer snapshot does not cut it short, the end does."""
        with self._lock:
            self._lock.wait_for(lambda: self._closing, timeout=next(self._pauses))

    def _say(self, news: dict[str, Any]) -> None:
        """`store_status`: the newest durable checkpoint, an export that failed, and what is being tried or fails."""
        status: dict[str, Any] = {"durable": self._durable} if self._durable else {}
        status |= ({"export": self._exporter.told} if self._exporter.told else {}) | news
        keys = RunKeys(self._role.run_id)
        write_small(self._role.redis, keys.flow, keys.store_status, "SET", json.dumps(status))

    def _save(self, manifest: Manifest, objects: dict[str, bytes]) -> None:
        self._store.ask()
        started = time.monotonic()
        self._say(self._trouble or {"writing": manifest.name, "since": round(time.time(), 3)})
        try:
            with self.stages.during("upload"):
                self._checkpoints.write(manifest, objects)
        except CheckpointDamaged as error:
            raise StoreError(str(error)) from None  # told in `status`; the next checkpoint has another name
        with self.stages.during("pointer and pruning"):
            stock = self._refresh(latest=manifest.name)
        if self._marker(READY) is None:
            content = {"run_id": self._role.run_id, "checkpoint": manifest.name, "created": manifest.created}
            self._checkpoints.write_marker(READY, content)
        oldest = memory_from(stock.entries, self._role.config.checkpoint.keep_last)
        with self.stages.during("archive"):
            self._archiver.store(manifest.log_position, self._role.flow.read().trimmed_id, oldest)
        self._exporter.remember(self._log, manifest.log_position)
        with self.stages.during("trim"):
            self._log.trim(self._epoch, manifest.log_position)
        self._durable = manifest.name
        text = f"{manifest.name} ({manifest.total_bytes / 1024:.0f} KiB in {time.monotonic() - started:.2f} s)"
        emit(self._role.redis, self._role.run_id, "checkpoint", text, name=manifest.name, version=manifest.version)

    def _with_news(self, manifest: Manifest) -> Manifest:
        """With the newest score known by now, and the books as they stand now, which also tell what is in flight.

        Not the snapshot's business: both depend on the others' speed.
        """
        known = {name: entry["evaluation"] for name, entry in status_entries(self._checkpoints).items()}
        known |= read_evaluations(self._role.redis, self._role.run_id)
        newest = max(
            (name for name in known if known[name]), key=lambda name: checkpoint_version(name) or 0, default=""
        )
        told = {"checkpoint": newest} | {key: known[newest].get(key) for key in _TOLD} if newest else None
        books = {worker: line.as_dict() for worker, line in read_books(self._role.redis, self._role.run_id).items()}
        news = {"evaluation": told, "books": books}
        return manifest.model_copy(update={"provenance": manifest.provenance | news})

    def _refresh(self, latest: str | None = None, final: str | None = None) -> Stock:
        """Pointer, status file and pruning, from what the store and the evaluations say now; answers what was there."""
        self._store.ask()
        pointer = self._pointer()
        if pointer is not None and pointer.epoch > self._epoch:
            raise Fenced(f"epoch {self._epoch}: a newer trainer has taken over (pointer: {pointer.epoch})")
        evaluations = read_evaluations(self._role.redis, self._role.run_id)
        stock = take_stock(self._checkpoints, evaluations, latest)
        newest = latest or (pointer.latest if pointer else None) or final
        if newest is None or newest not in stock.entries:
            if latest or final:  # nothing may be trimmed or ended on the word of a manifest that is not there
                raise StoreError(f"the manifest of {newest} does not read back from the store as it was written")
            self._noticed = evaluations
            return stock
        known = pointer.best if pointer and pointer.best in stock.entries else None  # of which all scores are lost
        best = next(iter(best_checkpoints(stock.scores, stock.names)), known)
        last = final or (pointer.final if pointer and latest is None else None)
        sha = stock.entries[newest]["manifest_sha256"]
        epoch = pointer.epoch if pointer and latest is None else self._epoch  # that of who wrote `latest`
        moved = Pointer(latest=newest, best=best, final=last, epoch=epoch, manifest_sha256=sha)
        if moved != pointer:
            self._checkpoints.write_pointer(moved)
        playing = {name for name in (self._in_evaluation(),) if name}
        removed = prune(self._checkpoints, stock, moved, self._role.config.checkpoint, playing)
        if removed:
            prune_evaluations(self._role.redis, self._role.run_id, {*stock.names} - {*removed})
        self._exporter.know([name for name in stock.readable if name not in removed], moved)
        self._noticed = evaluations
        return stock

    def _in_evaluation(self) -> str | None:
        """What the evaluator plays right now: it may turn out to be the best, and must not be pruned before."""
        beats = read_heartbeats(self._role.redis, self._role.run_id)
        playing = (beat.progress.get("evaluating") for beat in beats if beat.role == "evaluator" and beat.alive)
        return next(playing, None)

    def _pointer(self) -> Pointer | None:
        try:
            return self._checkpoints.pointer()
        except CheckpointDamaged:
            return None  # made anew by the next checkpoint

    def _marker(self, key: str) -> dict[str, Any] | None:
        try:
            return self._checkpoints.marker(key)
        except CheckpointDamaged:
            return None  # made anew
