"""Checkpoints into the store in the background, then pointer, status, archive, the log's trim, and pruning.

Order for each: objects → verify → manifest → pointer → status → archive → trim; then, apart from that, prune: a store
that refuses to delete holds up nothing. Training never waits for it (except for the first and the last checkpoint).
While the store is away it tries again without end, with growing pauses, says so in `status`, and the log keeps what is
not yet durable. Before each write the epoch is checked, so that a trainer that was replaced writes nothing.
"""

import contextlib
import functools
import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, cast

import redis

from stagecoach.shared.base.errors import (
    CheckpointDamaged,
    Fenced,
    ObjectMissing,
    ShardUnavailable,
    StoreError,
    StoreUnavailable,
    WaitTimeout,
)
from stagecoach.shared.base.printable import counted
from stagecoach.shared.base.stage_timer import StageTimer
from stagecoach.shared.config.sections import ArchiveConfig
from stagecoach.shared.experience.checkpoint_name import checkpoint_version
from stagecoach.shared.experience.log_entry import START, LogEntry, id_order
from stagecoach.shared.protocol.events import prune_evaluations, read_evaluations
from stagecoach.shared.protocol.experience_log import ExperienceLog
from stagecoach.shared.protocol.heartbeat import growing_pauses, read_heartbeats
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.ledger import read_accounting
from stagecoach.shared.protocol.redis_client import retries
from stagecoach.shared.protocol.scripts import write_small
from stagecoach.shared.runtime.run_context import RunContext
from stagecoach.shared.storage.checkpoint_store import READY, CheckpointStore, Manifest, Pointer
from stagecoach.shared.storage.due_evaluations import (
    delete_due_evaluation,
    due_evaluations,
    read_due_evaluation,
    write_due_evaluation,
)
from stagecoach.shared.storage.log_archive import Archive, Segment
from stagecoach.trainer_node.checkpointing import retention
from stagecoach.trainer_node.checkpointing.fenced_store import FencedStore, LateDeletions
from stagecoach.trainer_node.checkpointing.retention import Inventory, unless_damaged
from stagecoach.trainer_node.checkpointing.snapshot import Snapshot
from stagecoach.trainer_node.metrics.recorder import Recorder


class Archiver:
    """Puts log entries into a run's archive before they are trimmed, and keeps it as long as the config says.

    So the log and the archive together always hold everything since the archive began.
    """

    def __init__(self, archive: Archive, log: ExperienceLog, config: ArchiveConfig) -> None:
        self._archive, self._log, self._config = archive, log, config
        self._segments: list[Segment] | None = None
        """What the archive holds, oldest first; None where that has to be looked up."""

    def store(
        self, through: str, trimmed: str, replay_from: str | None = None, same: Callable[[], bool] = lambda: True
    ) -> None:
        """Everything through this position that is not there yet; raises as the store does.

        It ends where the log is no longer the `same` that the trainer reads: Redis may have lost some of it.

        Up to `trimmed` Redis has the log no more: where the archive was off, it begins there. From `replay_from` on a
        replay buffer of a checkpoint may be restored.
        """
        if self._config.keep == "off" and replay_from is None:
            return
        segments, self._segments = self._segments, None  # where a write fails, what came of it is looked up next time
        if segments is None:
            segments = [segment for segment in self._archive.segments() if self._whole(segment, trimmed)]
        after = max([trimmed, *(segment.through for segment in segments)], key=id_order)
        for start, end, entries in self._new(after, through):
            if not same():
                return
            segments.append(self._archive.write(start, end, entries))
        self._segments = segments if self._config.keep == "all" else self._forget(segments, replay_from)

    def _new(self, after: str, through: str) -> Iterator[tuple[str, str, list[LogEntry]]]:
        """The segments to write, each with the positions that it lies between."""
        batch, size = list[LogEntry](), 0
        for entry in self._log.between(after, through):
            hole = entry.fragment is None and not (entry.lost_body or entry.quarantined)  # it was lost since
            if not hole:
                batch.append(entry)
                size += len(entry.fragment or b"")
            if hole or size >= self._config.segment_bytes:
                if batch:
                    yield after, batch[-1].id, batch
                after, batch, size = entry.id, [], 0
        if batch:
            yield after, through, batch

    def _whole(self, segment: Segment, trimmed: str) -> bool:
        """What was cut off while it was written is deleted, since the log has it still."""
        if id_order(segment.through) <= id_order(trimmed) or self._archive.whole(segment):
            return True
        self._archive.delete(segment)
        return False

    def _forget(self, segments: list[Segment], replay_from: str | None) -> list[Segment]:
        """Deletes segments that are not needed any more, the oldest first, or a hole could stay; returns the others."""
        kept = len(segments)
        needed = [replay_from and id_order(segment.through) >= id_order(replay_from) for segment in segments]
        while kept and needed[kept - 1]:
            kept -= 1
        for segment in segments[:kept]:
            self._archive.delete(segment)
        return segments[kept:]


_LOGGER = logging.getLogger("stagecoach.writer")
_TICK_SECONDS = 0.5
_EVALUATION_FIELDS = ("mean_return", "episodes")
"""What a manifest tells of the newest evaluation."""


class DueEvaluations:
    """The policies that `evaluation.every` made due, as checkpoints: on their way into the store, or there until their
    score is recorded. The trainer's thread submits, the checkpoint writer's does the rest."""

    def __init__(self, store: LateDeletions, checkpoints: CheckpointStore, keep_best: int) -> None:
        self._store, self._checkpoints, self._keep_best = store, checkpoints, keep_best
        self._submitted: dict[str, Snapshot] = {}
        self._stored: dict[str, Collection[str]] | None = None
        """Name → the shared objects that it lists."""

    def submit(self, due: Snapshot) -> None:
        self._submitted[due.name] = due

    @property
    def names(self) -> set[str]:
        """Those without a recorded score."""
        return {*self._submitted, *(self._stored or ())}

    @property
    def submitted(self) -> int:
        """How many are not in the store yet."""
        return len(self._submitted)

    @property
    def shared_objects(self) -> set[str]:
        """The shared objects that one of them may need as a checkpoint."""
        return {sha256 for listed in (self._stored or {}).values() for sha256 in listed}

    def write(self, evaluated: Collection[str], evaluations: Mapping[str, dict[str, Any]]) -> None:
        """Stores what was submitted; of what is evaluated it keeps the best as checkpoints, and deletes the rest.
        Raises as the store does, and loses nothing."""
        if self._stored is None:
            self._stored = {name: self._shared_objects_of(name) for name in due_evaluations(self._store)}
        for name in list(self._submitted):
            if name not in evaluated:  # a trainer that learns the log again passes it again
                due = self._submitted[name].checkpoint
                write_due_evaluation(self._store, due)
                self._stored[name] = due.manifest.provenance.get("shared_objects", ())
            del self._submitted[name]
        done = sorted(self._stored.keys() & set(evaluated))
        for name in self._best(done, evaluations):
            with contextlib.suppress(CheckpointDamaged, ObjectMissing):
                due = read_due_evaluation(self._store, name)
                self._checkpoints.write(due.manifest, due.objects)
        for name in done:
            delete_due_evaluation(self._store, name)
            del self._stored[name]

    def _shared_objects_of(self, name: str) -> Collection[str]:
        with contextlib.suppress(CheckpointDamaged, ObjectMissing):
            manifest = read_due_evaluation(self._store, name).manifest
            return cast(Collection[str], manifest.provenance.get("shared_objects", ()))
        return ()

    def _best(self, done: Collection[str], evaluations: Mapping[str, dict[str, Any]]) -> list[str]:
        """Those of `done` that belong to the best, and of which there is no whole checkpoint."""
        if not done:
            return []
        there = retention.take_inventory(self._checkpoints, evaluations)
        scored = {**retention.confirmed_returns(evaluations), **there.scores}
        best = retention.best_checkpoints(scored, {*there.entries, *done})[: self._keep_best]
        return [name for name in best if name not in there.entries]


class CheckpointWriter:
    """Owns everything that the trainer writes into the store."""

    def __init__(self, role: RunContext, epoch: int, redis_process: Callable[[], str] = lambda: "") -> None:
        """`redis_process` is the Redis that the trainer's accounting was matched with last; '' for any."""
        self._role, self._epoch, self._log = role, epoch, role.log()
        self._fenced = FencedStore(role.checkpoints.store, role.flow, epoch)
        self.store = LateDeletions(self._fenced)
        self._checkpoints = CheckpointStore(self._fenced, role.run_id)
        self._redis_process = redis_process
        self.trimmed = START
        """Through where the log was trimmed last."""
        self._archiver = Archiver(Archive(self.store, role.run_id), self._log, role.config.archive)
        self._lock = threading.Condition()
        self.recorder: Recorder | None = None
        """Once it is there, its rows are stored before each checkpoint, and the evaluator's scores become rows."""
        self.due = DueEvaluations(self.store, self._checkpoints, role.config.checkpoint.keep_best)
        self._pending: Snapshot | None = None
        self._busy = self._closing = False
        self._noticed: dict[str, dict[str, Any]] = {}
        """The evaluations that pointer and status file reflect."""
        self._durable: str | None = None
        self._best: str | None = None
        self._outage: dict[str, Any] = {}
        """The store, or a Redis shard, fails, as `status` shows it; empty while they work."""
        self._announced: tuple[Inventory, Pointer, list[str]] | None = None
        """What the status file has announced, until it is deleted."""
        self._beyond = 0
        """How many checkpoints there are that the rule lets go."""
        self._undeleted: dict[str, Any] = {}
        """What the store has not deleted, and why, as `status` shows it; empty while it deletes."""
        self._pauses = growing_pauses()
        self.stages = StageTimer()
        """Of the background thread."""
        self.failure: BaseException | None = None
        """What ended the background thread (fenced, damaged store); the trainer raises it."""
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    @property
    def durable(self) -> int:
        """The newest version whose checkpoint this process has made durable; −1 before the first."""
        return -1 if self._durable is None else checkpoint_version(self._durable) or 0

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
                if retries(self._role.redis).abandoned:
                    raise WaitTimeout("it ends at once, while the checkpoint was not durable")
                remaining = max(0.0, deadline - time.monotonic())
                if not self._lock.wait(timeout=min(_TICK_SECONDS, remaining)) and time.monotonic() > deadline:
                    error = self._outage.get("error", "It has not responded yet")
                    raise WaitTimeout(
                        f"the checkpoint was not durable after {deadline_seconds:g} s; is the store away? {error}. "
                        f"What is in the log is not lost: `stagecoach resume` reads it again once the store is back"
                    )
        self.raise_failure()

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def close(self, wait_seconds: float = 30.0) -> None:
        """Ends the background thread after what it is doing."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self._thread.join(wait_seconds)

    def finish(self, name: str) -> Pointer:
        """Marks `name` as final; call when idle."""
        self._refresh(final=name)
        return cast(Pointer, self._checkpoints.pointer())

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
                        break
                if snapshot is not None:
                    self._until_durable(snapshot)
                    with self._lock:
                        self._busy = False
                        self._lock.notify_all()
                else:
                    self.notice_evaluations()
                    stale = self.recorder is not None and self.recorder.due
                    if (self.due.submitted or stale) and self._try(self._store_metrics):
                        self.tidy()
            self._try(self._store_metrics)
        except BaseException as error:
            with self._lock:
                self.failure, self._busy = error, False
                self._lock.notify_all()
            _LOGGER.exception("the writer ended")

    def notice_evaluations(self) -> None:
        """A new score may make another checkpoint the best one."""
        if read_evaluations(self._role.redis, self._role.run_id) != self._noticed and self._try(self._refresh):
            self.tidy()

    def _until_durable(self, snapshot: Snapshot) -> None:
        """Tries until it is in the store, or a newer snapshot waits that covers it."""
        # each try writes the same manifest: the store may carry out a put that was given up after the next one
        manifest = functools.cache(lambda: self._with_news(snapshot.checkpoint.manifest))
        while not self._try(lambda: self._save(manifest(), snapshot.checkpoint.objects)):
            with self._lock:
                if self._pending is not None or self._closing:
                    return
        with self.stages.during("pruning"):
            self.tidy()

    def tidy(self) -> None:
        """Deletes what is not needed any more. Whatever fails there is told once, and tried again the next time."""
        problem, removed, announced = "", list[str](), self._announced
        self._announced = None
        try:
            for name in retention.remove(self._checkpoints, *announced, self.due.shared_objects) if announced else ():
                removed.append(name)
            self.store.sweep()
        except (StoreError, StoreUnavailable) as error:
            problem = str(error)
        self._beyond -= len(removed)
        if announced and removed and not self.store.doomed and self.recorder is not None:  # else none is recorded yet
            prune_evaluations(self._role.redis, self._role.run_id, {*announced[0].names} - {*removed})
        left = {"checkpoints": self._beyond, "objects": len(self.store.doomed), "error": problem}
        known, self._undeleted = self._undeleted, left if problem else {}
        if problem and not known:
            _LOGGER.warning("the store does not delete: %s", problem)
            self._role.tell("store", f"the store does not delete, and keeps more than it should: {problem}")
        if self._undeleted != known:
            self._write_status(self._outage)

    def _try(self, write: Callable[[], object]) -> bool:
        """One try (of several by boto3); whether it worked. Where not, `status` and an event say why, and it pauses."""
        try:
            write()
        except (StoreError, StoreUnavailable, ShardUnavailable) as error:
            party = "a Redis shard" if isinstance(error, ShardUnavailable) else "the store"
            since, attempts = self._outage.get("since", round(time.time(), 3)), self._outage.get("attempts", 0) + 1
            self._outage = {"waiting_for": party, "since": since, "attempts": attempts, "error": str(error)}
            _LOGGER.warning("%s fails (try %d): %s", party, attempts, error)
            self._write_status(self._outage)
            if attempts == 1:
                self._role.tell("store", f"{party} fails, training continues: {error}")
            with self.stages.during("wait(the store)"), self._lock:
                self._lock.wait_for(lambda: self._closing, timeout=next(self._pauses))
            return False
        if outage := self._outage:
            seconds, often = max(0.0, time.time() - outage["since"]), counted(outage["attempts"], "time")
            text = f"{outage['waiting_for']} is back: it failed {often} in {seconds:.0f} s"
            self._outage, self._pauses = {}, growing_pauses()
            self._role.tell("store", text)
        self._write_status({})
        return True

    def _write_status(self, news: dict[str, Any]) -> None:
        """`store_status`: newest durable and best checkpoint, and what is being tried or fails."""
        status: dict[str, Any] = {"durable": self._durable} if self._durable else {}
        status |= {"best": self._best} if self._best else {}
        status |= {"undeleted": self._undeleted} if self._undeleted else {}
        status |= news
        keys = RunKeys(self._role.run_id)
        write_small(self._role.redis, keys, keys.store_status, "SET", json.dumps(status))

    def _save(self, manifest: Manifest, objects: dict[str, bytes]) -> None:
        self._fenced.ask()
        started = time.monotonic()
        self._write_status(self._outage or {"writing": manifest.name, "since": round(time.time(), 3)})
        try:
            with self.stages.during("metrics"):
                self._store_metrics()
            with self.stages.during("upload"):
                self._checkpoints.write(manifest, objects)
        except CheckpointDamaged as error:
            raise StoreError(str(error)) from None  # told in `status`; the next checkpoint has another name
        with self.stages.during("pointer and status"):
            inventory = self._refresh(latest=manifest.name)
        if unless_damaged(lambda: self._checkpoints.marker(READY)) is None:
            content = {"run_id": self._role.run_id, "checkpoint": manifest.name, "created": manifest.created}
            self._checkpoints.write_marker(READY, content)
        oldest = retention.replay_from(inventory.entries, self._role.config.checkpoint.keep_last)
        if self._redis_is(process := self._redis_process()):  # else the next checkpoint does it
            with self.stages.during("archive"):
                trimmed, position = self._role.flow.read().trimmed_id, manifest.log_position
                self._archiver.store(position, trimmed, oldest, lambda: self._redis_is(process))
            with self.stages.during("trim"):
                if self._redis_is(process):
                    self._log.trim(self._epoch, position, process)
                    self.trimmed = position
        again, self._durable = self._durable == manifest.name, manifest.name  # due, and the last one
        if self.recorder is not None:
            self.recorder.checkpointed(manifest.name)
        if again:
            return
        text = f"{manifest.name} ({manifest.total_bytes / 1024:.0f} KiB in {time.monotonic() - started:.2f} s)"
        self._role.tell("checkpoint", text, name=manifest.name, version=manifest.version)

    def _redis_is(self, process: str) -> bool:
        """Whether Redis is the process whose log the trainer has read: another one may have lost some of it."""
        return process in ("", self._role.flow.process())

    def _store_metrics(self) -> dict[str, dict[str, Any]]:
        """Before each checkpoint, so that nothing it covers is missing, and before pruning; returns the evaluations."""
        evaluations = read_evaluations(self._role.redis, self._role.run_id)
        if self.recorder is not None:
            evaluated = self.recorder.take_evaluations(evaluations)
            self.recorder.store()
            if self._role.config.evaluation.every is not None:
                self.due.write(evaluated, evaluations)
        return evaluations

    def _with_news(self, manifest: Manifest) -> Manifest:
        """With the newest score and the present accounting, which depend on the others' speed."""
        known = {name: entry["evaluation"] for name, entry in retention.status_entries(self._checkpoints).items()}
        known |= read_evaluations(self._role.redis, self._role.run_id)
        scored = [name for name in known if known[name]]
        newest = max(scored, key=lambda name: checkpoint_version(name) or 0, default="")
        told = {"checkpoint": newest} | {key: known[newest].get(key) for key in _EVALUATION_FIELDS} if newest else None
        accounting = read_accounting(self._role.redis, self._role.run_id)
        news = {"evaluation": told, "accounting": {worker: line.as_dict() for worker, line in accounting.items()}}
        return manifest.model_copy(update={"provenance": manifest.provenance | news})

    def _refresh(self, latest: str | None = None, final: str | None = None) -> Inventory:
        """Pointer and status file, from what the store and the evaluations say now; returns what is there. What goes is
        announced, for `tidy`."""
        self._fenced.ask()
        pointer = unless_damaged(self._checkpoints.pointer)
        if pointer is not None and pointer.epoch > self._epoch:
            raise Fenced(f"epoch {self._epoch}: a newer trainer has taken over (pointer: {pointer.epoch})")
        evaluations = self._store_metrics()
        inventory = retention.take_inventory(self._checkpoints, evaluations, latest)
        newest = latest or (pointer.latest if pointer else None) or final
        if newest is None or newest not in inventory.entries:
            if latest or final:  # nothing may be trimmed or ended by a manifest that is not there
                raise StoreError(f"the manifest of {newest} does not read back from the store as it was written")
            self._noticed = evaluations
            return inventory
        known = pointer.best if pointer and pointer.best in inventory.entries else None  # of which all scores are lost
        best = next(iter(retention.best_checkpoints(inventory.scores, inventory.names)), known)
        last = final or (pointer.final if pointer and latest in (None, pointer.final) else None)  # it was restored
        sha = inventory.entries[newest]["manifest_sha256"]
        epoch = pointer.epoch if pointer and latest is None else self._epoch  # that of who wrote `latest`
        moved = Pointer(latest=newest, best=best, final=last, epoch=epoch, manifest_sha256=sha)
        if moved != pointer:
            self._checkpoints.write_pointer(moved)
        self._best = best
        playing, rule = checkpoint_in_evaluation(self._role.redis, self._role.run_id), self._role.config.checkpoint
        most = 1 if self._undeleted else None  # of a store that does not delete one is tried
        announced, beyond = retention.announce(self._checkpoints, inventory, moved, rule, {playing}, most)
        self._beyond, self._announced = beyond, (inventory, moved, announced)
        self._noticed = evaluations
        return inventory


def checkpoint_in_evaluation(client: redis.Redis, run_id: str) -> str:
    """What the evaluator plays right now, or '': it may turn out to be the best, and must not be pruned before."""
    evaluators = (beat for beat in read_heartbeats(client, run_id) if beat.role == "evaluator" and beat.alive)
    return next((beat.progress.get("evaluating") or "" for beat in evaluators), "")
