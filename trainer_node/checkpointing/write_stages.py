"""The stages by which a snapshot becomes a durable checkpoint, in the order in which the checkpoint writer runs them.

Each writes through a store that refuses an older trainer's writes, and may run again after it failed halfway.
"""

from collections.abc import Callable
from typing import Any, Protocol

import redis

from stagecoach.shared.base.errors import CheckpointDamaged, Fenced, StoreError, StoreUnavailable
from stagecoach.shared.experience.checkpoint_name import checkpoint_version
from stagecoach.shared.experience.log_entry import START
from stagecoach.shared.protocol.events import prune_evaluations, read_evaluations
from stagecoach.shared.protocol.heartbeat import read_heartbeats
from stagecoach.shared.protocol.ledger import read_accounting
from stagecoach.shared.runtime.run_context import RunContext
from stagecoach.shared.storage.checkpoint_store import READY, CheckpointStore, Manifest, Pointer
from stagecoach.shared.storage.log_archive import Archive
from stagecoach.trainer_node.checkpointing import retention
from stagecoach.trainer_node.checkpointing.archiver import Archiver
from stagecoach.trainer_node.checkpointing.due_evaluations import DueEvaluations
from stagecoach.trainer_node.checkpointing.fenced_store import FencedStore, LateDeletions
from stagecoach.trainer_node.checkpointing.retention import Inventory, unless_damaged
from stagecoach.trainer_node.checkpointing.store_status import StoreStatus
from stagecoach.trainer_node.metrics.recorder import Recorder
from stagecoach.trainer_node.state.snapshot import Snapshot

_EVALUATION_FIELDS = ("mean_return", "episodes")
"""Fields of the newest evaluation that a manifest repeats."""


class Stage(Protocol):
    name: str
    """Name in the profile of the writer's thread."""

    def run(self, snapshot: Snapshot) -> None:
        """Raises as the store does, and `Fenced`; the writer then begins again with the first stage."""


class MetricsStage:
    """Stores metric rows and due policies, so that nothing is missing that the checkpoint covers."""

    name = "metrics"

    def __init__(self, role: RunContext, recorder: Recorder, due: DueEvaluations) -> None:
        self._role, self._recorder, self._due = role, recorder, due

    def run(self, snapshot: Snapshot) -> None:
        self.store()

    def store(self) -> dict[str, dict[str, Any]]:
        """Stores all that has come since; returns the evaluations, whose scores are recorded now."""
        evaluations = read_evaluations(self._role.redis, self._role.run_id)
        evaluated = self._recorder.take_evaluations(evaluations)
        self._recorder.store()
        if self._role.config.evaluation.every is not None:
            self._due.write(evaluated, evaluations)
        return evaluations

    @property
    def due(self) -> bool:
        """Returns whether something should be stored before the next checkpoint."""
        return bool(self._due.submitted) or self._recorder.due


class ObjectsStage:
    """Uploads the objects, reads them back, then writes the manifest."""

    name = "upload"

    def __init__(self, role: RunContext, checkpoints: CheckpointStore) -> None:
        self._role, self._checkpoints = role, checkpoints
        self._made: tuple[Snapshot, Manifest] | None = None
        """Each try writes the same manifest: the store may carry out a put that was given up after the next one."""

    def run(self, snapshot: Snapshot) -> None:
        if self._made is None or self._made[0] is not snapshot:
            self._made = snapshot, self._with_news(snapshot.checkpoint.manifest)
        try:
            self._checkpoints.write(self._made[1], snapshot.checkpoint.objects)
        except CheckpointDamaged as error:
            raise StoreError(str(error)) from None  # shown in `status`; the next checkpoint has another name

    def _with_news(self, manifest: Manifest) -> Manifest:
        """Adds the newest score and the present accounting, which depend on the speed of other processes."""
        known = {name: entry["evaluation"] for name, entry in retention.status_entries(self._checkpoints).items()}
        known |= read_evaluations(self._role.redis, self._role.run_id)
        scored = [name for name in known if known[name]]
        newest = max(scored, key=lambda name: checkpoint_version(name) or 0, default="")
        told = {"checkpoint": newest} | {key: known[newest].get(key) for key in _EVALUATION_FIELDS} if newest else None
        accounting = read_accounting(self._role.redis, self._role.run_id)
        news = {"evaluation": told, "accounting": {worker: line.as_dict() for worker, line in accounting.items()}}
        return manifest.model_copy(update={"provenance": manifest.provenance | news})


class RetentionStage:
    """Deletes checkpoints that the retention rule does not keep; a store that refuses to delete delays nothing."""

    name = "pruning"

    def __init__(
        self, role: RunContext, store: LateDeletions, checkpoints: CheckpointStore, due: DueEvaluations,
        status: StoreStatus,
    ) -> None:  # fmt: skip
        self._role, self._store, self._checkpoints, self._due, self._status = role, store, checkpoints, due, status
        self._announced: tuple[Inventory, Pointer, list[str]] | None = None
        """Announced deletions, until `tidy` carries them out."""
        self._beyond = 0
        """Number of checkpoints that the rule does not keep."""

    def announce(self, inventory: Inventory, pointer: Pointer) -> None:
        """Writes the status file without the checkpoints that `tidy` is to delete."""
        playing, rule = checkpoint_in_evaluation(self._role.redis, self._role.run_id), self._role.config.checkpoint
        most = 1 if self._status.undeleted else None  # tries one deletion on a store that has refused some
        announced, self._beyond = retention.announce(self._checkpoints, inventory, pointer, rule, {playing}, most)
        self._announced = inventory, pointer, announced

    def run(self, snapshot: Snapshot) -> None:
        self.tidy()

    def tidy(self) -> None:
        """Deletes what is no longer needed. Reports a failure once, and tries again the next time."""
        problem, removed, announced = "", list[str](), self._announced
        self._announced = None
        try:
            for name in retention.remove(self._checkpoints, *announced, self._due.shared_objects) if announced else ():
                removed.append(name)
            self._store.sweep()
        except (StoreError, StoreUnavailable) as error:
            problem = str(error)
        self._beyond -= len(removed)
        if announced and removed and not self._store.doomed:
            prune_evaluations(self._role.redis, self._role.run_id, {*announced[0].names} - {*removed})
        self._status.show_undeleted(self._beyond, len(self._store.doomed), problem)


class PointerStage:
    """Writes pointer and status file, from what the store and the evaluations say now."""

    name = "pointer and status"

    def __init__(
        self, role: RunContext, store: FencedStore, checkpoints: CheckpointStore, metrics: MetricsStage,
        retention_stage: RetentionStage, status: StoreStatus,
    ) -> None:  # fmt: skip
        self._role, self._store, self._checkpoints, self._epoch = role, store, checkpoints, store.epoch
        self._metrics, self._retention, self._status = metrics, retention_stage, status
        self.inventory = Inventory([], {}, [])
        """Contents of the store at its last run."""
        self._noticed: dict[str, dict[str, Any]] = {}
        """The evaluations that pointer and status file reflect."""

    def run(self, snapshot: Snapshot) -> None:
        self.refresh(latest=snapshot.name)
        if unless_damaged(lambda: self._checkpoints.marker(READY)) is None:
            content = {"run_id": self._role.run_id, "checkpoint": snapshot.name}
            self._checkpoints.write_marker(READY, content | {"created": snapshot.checkpoint.manifest.created})

    @property
    def evaluated(self) -> bool:
        """Returns whether there are new scores, by which another checkpoint may be the best."""
        return read_evaluations(self._role.redis, self._role.run_id) != self._noticed

    def refresh(self, latest: str | None = None, final: str | None = None) -> None:
        self._store.ask()
        pointer = unless_damaged(self._checkpoints.pointer)
        if pointer is not None and pointer.epoch > self._epoch:
            raise Fenced(f"epoch {self._epoch}: a newer trainer has taken over (pointer: {pointer.epoch})")
        # stored with this checkpoint's rows already, unless scores arrived while its objects were uploaded
        evaluations = self._metrics.store() if self.evaluated else self._noticed
        self.inventory = inventory = retention.take_inventory(self._checkpoints, evaluations, latest)
        newest = latest or (pointer.latest if pointer else None) or final
        if newest is None or newest not in inventory.entries:
            if latest or final:  # nothing may be trimmed or ended by a manifest that is not there
                raise StoreError(f"the manifest of {newest} does not read back from the store as it was written")
            self._noticed = evaluations
            return
        known = pointer.best if pointer and pointer.best in inventory.entries else None  # of which all scores are lost
        best = next(iter(retention.best_checkpoints(inventory.scores, inventory.names)), known)
        last = final or (pointer.final if pointer and latest in (None, pointer.final) else None)  # it was restored
        sha = inventory.entries[newest]["manifest_sha256"]
        epoch = pointer.epoch if pointer and latest is None else self._epoch  # that of who wrote `latest`
        moved = Pointer(latest=newest, best=best, final=last, epoch=epoch, manifest_sha256=sha)
        if moved != pointer:
            self._checkpoints.write_pointer(moved)
        self._status.best = best
        self._retention.announce(inventory, moved)
        self._noticed = evaluations


class ArchiveStage:
    """Archives the log through the checkpoint's position, if Redis is still the process that the trainer reads."""

    name = "archive"

    def __init__(
        self, role: RunContext, store: LateDeletions, pointer: PointerStage, redis_process: Callable[[], str]
    ) -> None:
        """`redis_process` returns the process that the trainer's accounting was last matched with, '' for any."""
        self._role, self._pointer, self._redis_process = role, pointer, redis_process
        self._archiver = Archiver(Archive(store, role.run_id), role.log(), role.config.archive)
        self.process = ""
        """The Redis process whose log it archived last."""

    def run(self, snapshot: Snapshot) -> None:
        self.process = self._redis_process()
        if self.same_redis():
            oldest = retention.replay_from(self._pointer.inventory.entries, self._role.config.checkpoint.keep_last)
            trimmed = self._role.flow.read().trimmed_id

            def complete() -> bool:  # else a newer trainer has trimmed what was about to be read
                return self._role.flow.read().trimmed_id == trimmed and self.same_redis()

            self._archiver.store(snapshot.log_position, trimmed, oldest, complete)

    def same_redis(self) -> bool:
        return self.process in ("", self._role.flow.process())


class TrimStage:
    """Trims the log through the position of the checkpoint, which is durable now."""

    name = "trim"

    def __init__(self, role: RunContext, epoch: int, archive: ArchiveStage) -> None:
        self._epoch, self._log, self._archive = epoch, role.log(), archive
        self.trimmed = START

    def run(self, snapshot: Snapshot) -> None:
        if self._archive.same_redis():
            self._log.trim(self._epoch, snapshot.log_position, self._archive.process)
            self.trimmed = snapshot.log_position


def checkpoint_in_evaluation(client: redis.Redis, run_id: str) -> str:
    """Returns the checkpoint that the evaluator is playing, or '': it may be the best, so it is not pruned."""
    evaluators = (beat for beat in read_heartbeats(client, run_id) if beat.role == "evaluator" and beat.alive)
    return next((beat.progress.get("evaluating") or "" for beat in evaluators), "")
