"""The publisher: checkpoints into the store in the background, then pointer, status, pruning, and the log's trim.

Order for each: objects → verify → manifest → pointer → status → prune → trim. Training never waits for it (except for
the first and the last checkpoint); while the store is away it tries again, says so in `status`, and the log keeps
what is not yet durable. Before each write the epoch is checked, so that a trainer that was replaced writes nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from typing import Any

from shared.checkpoint import READY, STATUS, Pointer
from shared.errors import CheckpointDamaged, CheckpointError, Fenced, StoreError, StoreUnavailable, WaitTimeout
from shared.events import emit, read_evaluations
from shared.experience_log import ExperienceLog
from shared.redis_keys import RunKeys
from shared.role import Role
from trainer_node.retention import best_checkpoints, superfluous
from trainer_node.snapshot import Snapshot

_LOGGER = logging.getLogger("stagecoach.publisher")
_TICK_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 5.0


class Publisher:
    """Owns everything that the trainer writes into the store."""

    def __init__(self, role: Role, epoch: int) -> None:
        self._role = role
        self._epoch = epoch
        self._checkpoints = role.checkpoints
        self._log = ExperienceLog(role.redis, role.run_id)
        self._lock = threading.Condition()
        self._pending: Snapshot | None = None
        self._busy = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self.failure: BaseException | None = None
        """What ended the background thread (fenced, damaged store); the trainer raises it."""

    def start(self) -> None:
        """Begins to work in the background."""
        self._thread.start()

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
                if not self._lock.wait(timeout=max(0.0, deadline - time.monotonic())) and time.monotonic() > deadline:
                    raise WaitTimeout(f"the checkpoint was not durable after {deadline_seconds:g} s; is the store away?")
        if self.failure is not None:
            raise self.failure

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
        seen = -1
        try:
            while True:
                with self._lock:
                    if self._pending is None and not self._closing:
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
                    seen = self._notice_evaluations(seen)
        except BaseException as error:
            with self._lock:
                self.failure, self._busy = error, False
                self._lock.notify_all()
            _LOGGER.exception("the publisher ended")

    def _notice_evaluations(self, seen: int) -> int:
        """A new score may make another checkpoint the best one."""
        found = len(read_evaluations(self._role.redis, self._role.run_id))
        if found != seen and seen >= 0:
            try:
                self._refresh()
            except (StoreError, StoreUnavailable) as error:
                self._say({"waiting_for": "the store", "error": str(error)})
                return seen
        return found

    def _until_durable(self, snapshot: Snapshot) -> None:
        """Tries until it is in the store, or a newer snapshot waits that covers it."""
        started, pause, attempts = time.time(), 0.2, 0
        while True:
            try:
                self._save(snapshot)
                self._say({"durable": snapshot.manifest.name})
                return
            except (StoreError, StoreUnavailable) as error:
                attempts += 1
                _LOGGER.warning("%s is not durable yet (try %d): %s", snapshot.manifest.name, attempts, error)
                self._say({"waiting_for": "the store", "since": started, "attempts": attempts, "error": str(error)})
                if attempts == 1:
                    emit(self._role.redis, self._role.run_id, "store", f"the store fails, training goes on: {error}")
            with self._lock:
                self._lock.wait(timeout=pause)
                if self._pending is not None:
                    return
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _say(self, status: dict[str, Any]) -> None:
        self._role.redis.set(RunKeys(self._role.run_id).store_status, json.dumps(status))

    def _check_epoch(self) -> None:
        if not self._role.flow.holds(self._epoch):
            raise Fenced(f"epoch {self._epoch} may not write checkpoints; a newer trainer has taken over")

    def _save(self, snapshot: Snapshot) -> None:
        manifest = snapshot.manifest
        self._check_epoch()
        started = time.monotonic()
        try:
            self._checkpoints.write(manifest, snapshot.objects)
        except CheckpointDamaged as error:
            raise StoreError(str(error)) from None  # told in `status`; the next checkpoint has another name
        self._refresh(latest=manifest.name)
        if self._checkpoints.marker(READY) is None:
            content = {"run_id": self._role.run_id, "checkpoint": manifest.name, "created": manifest.created}
            self._checkpoints.write_marker(READY, content)
        self._log.trim(self._epoch, manifest.log_position)
        text = f"{manifest.name} ({manifest.total_bytes / 1024:.0f} KiB in {time.monotonic() - started:.2f} s)"
        emit(self._role.redis, self._role.run_id, "checkpoint", text, name=manifest.name, version=manifest.version)

    def _refresh(self, latest: str | None = None, final: str | None = None) -> None:
        """Pointer, status file and pruning, from what the store and the evaluations say now."""
        self._check_epoch()
        pointer, names = self._checkpoints.pointer(), self._checkpoints.names()
        if pointer is not None and pointer.epoch > self._epoch:
            raise Fenced(f"epoch {self._epoch}: the pointer was written by epoch {pointer.epoch}")
        newest = latest or (pointer.latest if pointer else None)
        if newest is None:
            return
        entries = {entry["name"]: entry for entry in self._status_entries() if entry["name"] in names}
        evaluations = read_evaluations(self._role.redis, self._role.run_id)
        for name in [name for name in names if name not in entries]:
            try:
                entries[name] = self._entry(name)
            except CheckpointError:
                continue  # another trainer's unfinished upload, or damaged: neither kept for good nor pointed to
        for name, entry in entries.items():
            entry["evaluation"] = evaluations.get(name, entry["evaluation"])
        scores = {name: entry["evaluation"]["mean_return"] for name, entry in entries.items() if entry["evaluation"]}
        best = next(iter(best_checkpoints(scores, names)), None)
        last = final or (pointer.final if pointer and latest is None else None)
        sha = entries[newest]["manifest_sha256"] if newest in entries else ""
        moved = Pointer(latest=newest, best=best, final=last, epoch=self._epoch, manifest_sha256=sha)
        if moved != pointer:
            self._checkpoints.write_pointer(moved)
        doomed = superfluous(names, scores, self._role.config.checkpoint, {name for name in (newest, best, last) if name})
        kept = [entries[name] for name in names if name in entries and name not in doomed]
        status = {"run_id": self._role.run_id, "latest": newest, "best": best, "final": last, "checkpoints": kept}
        self._checkpoints.write_marker(STATUS, status)
        for name in doomed:
            self._checkpoints.delete(name)

    def _status_entries(self) -> list[dict[str, Any]]:
        try:
            status = self._checkpoints.marker(STATUS)
        except CheckpointDamaged:
            return []  # made anew from the manifests
        return list(status["checkpoints"]) if status else []

    def _entry(self, name: str) -> dict[str, Any]:
        data, manifest = self._checkpoints.read_manifest(name)
        return {
            "name": name,
            "version": manifest.version,
            "env_steps": manifest.provenance["counters"]["train"]["env_steps"],
            "created": manifest.created,
            "bytes": manifest.total_bytes,
            "mean_return": manifest.provenance["mean_return"],
            "evaluation": None,
            "manifest_sha256": hashlib.sha256(data).hexdigest(),
        }
