"""State of a trainer between two updates, and its two ways out: snapshots for the store, versions for the workers."""

from collections.abc import Iterable
from functools import partial
from typing import Literal

from stagecoach.shared.base import world
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.counters import Phase, PhaseCounters
from stagecoach.shared.experience.spaces import EnvironmentDescription
from stagecoach.shared.policies.serialization import VersionHeader, encode_board, state_arrays
from stagecoach.shared.protocol.heartbeat import poll
from stagecoach.shared.protocol.policy_board import PolicyBoard, Published
from stagecoach.shared.storage.shared_objects import write_shared_object
from stagecoach.trainer_node.checkpointing.checkpoint_writer import CheckpointWriter
from stagecoach.trainer_node.learning.learner import Learner
from stagecoach.trainer_node.recovery.incarnation import Incarnation
from stagecoach.trainer_node.state import snapshot
from stagecoach.trainer_node.state.log_consumer import LogConsumer, RedisAccounting
from stagecoach.trainer_node.state.snapshot import Lineage, Parent, Progress, Snapshot, phase_at


class RunSchedule:
    """Schedule of checkpoints and evaluations, and the bounds of `stop_at`."""

    def __init__(self, config: Config) -> None:
        self._config, self._checkpoint_index, self._evaluation_index = config, 0, 0
        self._started = self._checkpointed_at = world.monotonic()

    def checkpoint_due(self, counters: PhaseCounters, log_bytes: int) -> bool:
        """Returns whether one is due by counters, by the clock, or because the log is half full (which it frees)."""
        checkpoint, passed = self._config.checkpoint, world.monotonic() - self._checkpointed_at
        timed = checkpoint.every_seconds is not None and passed >= checkpoint.every_seconds
        counted = checkpoint.every.index(counters.train) > self._checkpoint_index
        return counted or timed or self.log_half_full(log_bytes)

    def evaluation_due(self, counters: PhaseCounters) -> bool:
        """Returns whether a multiple of `evaluation.every` was passed since the last call."""
        every, before = self._config.evaluation.every, self._evaluation_index
        self._evaluation_index = every.index(counters.train) if every else 0
        return self._evaluation_index > before

    def log_half_full(self, log_bytes: int) -> bool:
        return log_bytes >= self._config.rollout.max_log_bytes // 2

    def checkpointed(self, counters: PhaseCounters) -> None:
        """The next one is counted from here."""
        self._checkpoint_index = self._config.checkpoint.every.index(counters.train)
        self._checkpointed_at = world.monotonic()

    def exhausted(self, counters: PhaseCounters) -> bool:
        stop, train = self._config.stop_at, counters.train
        hours = (world.monotonic() - self._started) / 3600
        bounds = stop.env_steps, stop.updates, stop.episodes, stop.hours
        values = train.env_steps, train.updates, train.episodes, hours
        return any(bound is not None and value >= bound for bound, value in zip(bounds, values, strict=True))


_WAITS = {
    "first": "the first checkpoint to be durable",
    "version": "the policy version to be durable",
    "last": "the last checkpoint to be durable",
    "due": "the store to take policies that are due to be evaluated",
}


_MOST_DUE = 16
"""Policies due to be evaluated that may wait in memory for the store."""


class TrainerState:
    """Learner, log consumer, policy version and lineage: at first those of the untrained version 0."""

    def __init__(
        self, incarnation: Incarnation, description: EnvironmentDescription, accounting: RedisAccounting,
        learner: Learner, writer: CheckpointWriter,
    ) -> None:  # fmt: skip
        role = incarnation.role
        self._incarnation, self._config, self._run_id = incarnation, role.config, role.run_id
        self._board, self._accounting = PolicyBoard(role.redis, role.run_id, role.bodies.memory), accounting
        self._taken: Snapshot | None = None
        self.description, self.learner, self.writer = description, learner, writer
        read, stages = incarnation.read_log, incarnation.heartbeat.stages
        self.consumer = LogConsumer(role.run_id, role.config, description, read, accounting, stages)
        self.schedule = RunSchedule(role.config)
        self.version, self.lineage, self.parent = 0, Lineage(), Parent()
        self._stored = set[str]()
        self._named = set[str]()
        """All objects that the folds named in the last version."""
        self._left: dict[str, int] = {}
        """Objects that no fold names any more → the version since which, or at which a running episode last had them.
        Checkpoints list them until a later one is durable and no version that names them may act."""

    @property
    def phase(self) -> Phase:
        return phase_at(self._config, self.learner.counters)

    def snapshot(self) -> Snapshot:
        """Taken once per version: a checkpoint that is due and the last one may coincide."""
        if self._taken is None or self._taken.version != self.version:
            self._taken = self.new_snapshot()
        return self._taken

    def snapshot_of_lineage(self) -> Snapshot:
        self._taken = None
        taken = self.snapshot()
        self._descend_from(taken)
        return taken

    def new_snapshot(self) -> Snapshot:
        self._store_objects()
        progress = Progress(self.version, self._incarnation.epoch, self.parent, self.lineage)
        if self._left:
            used = self._incarnation.log.objects_in_episodes()
            self._left |= dict.fromkeys(self._left.keys() & used, self.version)
        bound = min(self.writer.durable, self.version - self._config.rollout.max_policy_lag)
        self._left = {sha256: version for sha256, version in self._left.items() if version > bound}
        committed, left = self.consumer.committed, tuple(self._left)
        return snapshot.take(self.learner, self._config, self._run_id, progress, committed, left)

    def restore_objects(self, listed: Iterable[str]) -> None:
        self._named = {sha256 for fold in self.learner.folds for sha256 in fold.objects()}
        self._left = dict.fromkeys({*listed} - self._named, self.version)

    def _store_objects(self) -> None:
        """Stores the folds' new objects before a version or a checkpoint names them; waits for the store."""
        new = {sha256: data for fold in self.learner.folds for sha256, data in fold.new_objects().items()}
        named = {sha256 for fold in self.learner.folds for sha256 in fold.objects()}
        self._left |= dict.fromkeys((self._named | new.keys()) - named, self.version)
        self._named = named
        for sha256 in sorted(new.keys() - self._stored):
            self._incarnation.with_store(partial(write_shared_object, self.writer.store, new[sha256]))
        self._stored = {*new}

    def checkpoint(self) -> None:
        """Submits a checkpoint of the present version; later checkpoints are counted from it."""
        taken = self.snapshot()
        self.writer.submit(taken)
        self._descend_from(taken)

    def submit_evaluation(self) -> None:
        """The present version as due to be evaluated, and to be kept if it is one of the best."""
        with self._incarnation.heartbeat.waiting(_WAITS["due"], self._incarnation.outage_seconds, outage=True) as wait:
            poll(wait, lambda: self.writer.due.submitted < _MOST_DUE or self.writer.failure is not None)
        self.consumer.commit(self.version)  # its position is behind what this version has learned from
        self.writer.due.submit(self.new_snapshot())

    def save_durably(self, which: Literal["first", "version", "last"], taken: Snapshot | None = None) -> Snapshot:
        """Stores a snapshot (by default of the present version), and waits until that is durable."""
        taken, seconds = taken or self.snapshot(), self._incarnation.outage_seconds
        self.writer.submit(taken)
        with self._incarnation.heartbeat.waiting(_WAITS[which], seconds, outage=True):
            self.writer.wait_idle(seconds)
        return taken

    def publish(self, consumed: int) -> Published:
        """Publishes version, credit and accounting in one step. Raises `Fenced`, and `RedisRolledBack`."""
        self.consumer.trimmed(self.writer.trimmed)
        self.consumer.commit(self.version)
        self._store_objects()
        history = self.consumer.history(self.version)
        header = VersionHeader(self.version, self.phase, self.learner.counters, self.learner.tables(), history)
        blob, name = b"", ""
        if self._config.policy_versions.transport == "object_store":
            taken = self.save_durably("version")
            name = taken.name
            self._descend_from(taken)
        else:
            blob = encode_board({id_: state_arrays(policy) for id_, policy in self.learner.policies.items()}, header)
        return self._board.publish(
            epoch=self._incarnation.epoch, version=self.version, consumed=consumed,
            committed_id=self.consumer.committed.position, ledger=self.consumer.ledger, header=header, blob=blob,
            checkpoint=name, process=self._accounting.redis_process,
        )  # fmt: skip

    @property
    def board_lost(self) -> bool:
        """True if workers cannot read the last published version any more."""
        return self._board.lost

    def _descend_from(self, taken: Snapshot) -> None:
        self.schedule.checkpointed(self.learner.counters)
        self.parent = Parent(taken.name, taken.log_position, self.version)
