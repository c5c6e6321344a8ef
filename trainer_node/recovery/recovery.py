"""Recovery: how a trainer resumes its run, from the newest checkpoint and the log behind it.

What happens between a `kill -9` of the trainer and its next update, in the order in which it happens:

1. The coordinator (or a person) starts a new process. `Recovery.start` fences the dead trainer with a higher epoch and
   loads the newest checkpoint that verifies. Without one the run begins with version 0, untrained.
2. It counts the death. Log entries over which several trainers died in a row, and from which that checkpoint has not
   learned, go into quarantine.
3. `_continuation` decides how to continue: by reading the log again; by fast-forwarding a Redis that knows less than
   the checkpoint; or, where the log behind the checkpoint is gone, by rolling back to it as a new version.
4. `restore_learner` puts the checkpoint into the learner, and reads again what replay buffers held.
5. The loop (trainer_node/trainer.py) learns again what the log holds behind the checkpoint. It reaches the same
   versions, bit by bit, which Redis knows already; the first version new to Redis is the next update.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Self

import redis

from stagecoach.shared.base import world
from stagecoach.shared.base.errors import (
    ArchiveIncomplete,
    BodyLost,
    CheckpointNotFound,
    Fenced,
    RedisRolledBack,
    StoreUnavailable,
    VersionsDiverged,
)
from stagecoach.shared.datasets.read import read_dataset
from stagecoach.shared.experience import fragment
from stagecoach.shared.experience.fragment import Fragment
from stagecoach.shared.experience.log_entry import START, LogEntry, before, id_order
from stagecoach.shared.protocol.events import emit
from stagecoach.shared.protocol.experience_log import ExperienceLog
from stagecoach.shared.protocol.ledger import Forward, Ledger, fast_forward
from stagecoach.shared.protocol.policy_board import Published
from stagecoach.shared.runtime.run_context import RunContext
from stagecoach.shared.storage.checkpoint_store import Checkpoint, CheckpointStore, Manifest
from stagecoach.shared.storage.log_archive import Archive
from stagecoach.trainer_node.checkpointing.checkpoint_writer import CheckpointWriter
from stagecoach.trainer_node.checkpointing.retention import unless_damaged
from stagecoach.trainer_node.learning.learner import Learner, make_learner
from stagecoach.trainer_node.recovery.incarnation import Incarnation
from stagecoach.trainer_node.recovery.trainer_state import TrainerState
from stagecoach.trainer_node.state import snapshot
from stagecoach.trainer_node.state.fork import rolled_back
from stagecoach.trainer_node.state.log_consumer import RedisAccounting

_LOGGER = logging.getLogger("stagecoach.trainer")


class Recovery:
    """Brings a trainer's state to where its run stands: when it begins, and whenever Redis comes back with less."""

    def __init__(self, incarnation: Incarnation, accounting: RedisAccounting, state: TrainerState) -> None:
        self.incarnation, self._role, self._log = incarnation, incarnation.role, incarnation.log
        self.accounting, self.state = accounting, state
        self.redis_checked = 0.0
        """Time at which Redis was last the process that the accounting was matched with."""
        self._forwards = 0

    @classmethod
    def start(cls, incarnation: Incarnation) -> Self:
        """Fences all older trainers, counts a death, and returns with a version on the board. Raises `StagecoachError`
        if too many trainers have died in a row (shared/protocol/quarantine.py)."""
        role = incarnation.role
        incarnation.heartbeat.start()
        description = incarnation.with_store(role.description)  # a trainer that cannot reach the store fences none
        last = incarnation.with_store(lambda: last_epoch(role.checkpoints))
        incarnation.epoch = role.flow.take_over(last, role.bodies.memory.token)
        accounting = RedisAccounting(role.redis, role.run_id, incarnation.epoch)
        checkpoint = incarnation.with_store(lambda: newest_checkpoint(role.checkpoints, role.redis))
        durable = checkpoint.manifest.log_position if checkpoint else START
        accounting.begin(role.config.rollout.restarts_allowed, durable)
        accounting.redis_process = role.flow.process()
        learner = make_learner(role.config, description, read_dataset=read_dataset)
        incarnation.with_store(learner.read_demonstrations)
        rolled, how = None, ""
        if checkpoint is None:
            _refuse_lost_checkpoints(role)
        else:
            rolled, how = incarnation.with_store(partial(_continuation, role, checkpoint, incarnation.epoch))
            checkpoint = rolled.checkpoint if rolled else checkpoint
        writer = _start_writer(incarnation, accounting, checkpoint)
        recovery = cls(incarnation, accounting, TrainerState(incarnation, description, accounting, learner, writer))
        if checkpoint is None:
            recovery._begin()
        else:
            if rolled is not None:
                recovery.state.save_durably("version", rolled)
            recovery._restore(checkpoint, how)
        recovery.state.schedule.checkpointed(learner.counters)
        recovery.state.schedule.evaluation_due(learner.counters)  # what was passed by now is not due any more
        return recovery

    def _begin(self) -> None:
        self.state.consumer.commit(0)
        taken = self.state.save_durably("first")
        self.publish(0)
        self.state.parent = snapshot.Parent(taken.name, taken.log_position)

    def _restore(self, checkpoint: Checkpoint, text: str) -> None:
        """Continues from a checkpoint; a Redis that knows less is fast-forwarded to it."""
        state, archive = self.state, self._role.archive()
        try:
            restored = self.incarnation.with_store(
                lambda: restore_learner(state.learner, checkpoint, archive, self._log)
            )
        except ArchiveIncomplete as error:
            known = snapshot.read_state(checkpoint)
            state.consumer.restore(known.committed)
            behind = self._role.flow.read().version < known.version
            same = not behind or self._forward(Forward.ANYWAY)  # before anything is archived from this Redis
            self._restore_what_is_left(checkpoint, str(error), self._log if same else None)
            return
        state.version, state.lineage = restored.version, restored.lineage
        state.parent = snapshot.Parent(checkpoint.manifest.name, restored.committed.position, restored.version)
        state.consumer.restore(restored.committed)
        state.restore_objects(checkpoint.manifest.provenance.get("shared_objects", ()))
        if self._role.flow.read().version < state.version:
            self._forward(Forward.ANYWAY)
        self.incarnation.emit_event(text)
        if self._role.flow.read().version <= state.version:
            self.publish(0)
        state.writer.submit(state.snapshot())  # where the store has it: completes what a crash left undone

    def _restore_what_is_left(self, checkpoint: Checkpoint, lost: str, log: ExperienceLog | None) -> None:
        """Continues as a new version, without what replay buffers held and is neither in the archive nor, if given, in
        the log: Redis or a shard lost it before it was archived, so the log does not lead to the same weights."""
        archive = self._role.archive()

        def forget(learner: Learner) -> None:
            learner.remember_only(readable(learner, archive, log))
            learner.recall_anew(held(learner, archive, log))

        taken = self._roll_back(checkpoint, forget)
        checkpoint = self.state.save_durably("version", taken).checkpoint
        self._restore(checkpoint, f"{lost}: continues without it as version {checkpoint.manifest.version}")
        begins, ranks, description = self.state.snapshot(), self.incarnation.ranks, self.state.description
        self.incarnation.with_store(
            lambda: ranks.begin(begins, description, held(self.state.learner, archive, self._log))
        )

    def _roll_back(
        self, checkpoint: Checkpoint, change: Callable[[Learner], None] = lambda learner: None
    ) -> snapshot.Snapshot:
        role, epoch = self._role, self.incarnation.epoch
        return self.incarnation.with_store(lambda: rolled_back(role, checkpoint, epoch, change))

    def continue_without(self, error: BodyLost | VersionsDiverged) -> None:
        """Continues as a new version, durable before any worker acts with it, as the log does not lead to Redis's."""
        reached = self.state.snapshot()
        taken = self._roll_back(reached.checkpoint)
        checkpoint = self.state.save_durably("version", taken).checkpoint
        self._restore(checkpoint, f"{error}: {reached.name} continues as version {checkpoint.manifest.version}")

    def publish(self, consumed: int) -> Published:
        """The present version on the board; with it all that Redis has lost, where it came back with less."""
        try:
            return self.state.publish(consumed)
        except RedisRolledBack:
            return self.redis_came_back()
        except VersionsDiverged as error:
            self.continue_without(error)
            return self.state.publish(0)

    def redis_restarted(self, seconds: float = 1.0) -> bool:
        """Returns whether Redis is another process than before; asks at most once in so many seconds."""
        if world.monotonic() - self.redis_checked < seconds:
            return False
        self.redis_checked = world.monotonic()
        return self._role.flow.process() != self.accounting.redis_process

    def redis_came_back(self) -> Published:
        """Restores a Redis that came back with less than it had. All that the trainer knows is in the log or durable
        before any worker acts with it: so the next trainer reaches the same versions, or continues behind them."""
        state, process = self.state, self._role.flow.process()
        if not self._role.flow.holds(self.incarnation.epoch):
            raise Fenced(f"epoch {self.incarnation.epoch}: a newer trainer has taken over")
        state.consumer.restore(state.consumer.committed)
        if self._role.flow.read().version > state.version:  # it has all that was read again so far
            same = self._forward(Forward.COMPARE)
            self.accounting.redis_process = process
            if same:
                return self.publish(0)
            self.continue_without(VersionsDiverged("Redis came back with another log than the one that was learned"))
            return self.state.publish(0)
        lost = not self._forward(Forward.IF_SAME)
        if lost and state.writer.durable < state.version:
            self._save_what_is_lost()
            if self._forgets_what_is_lost(process):
                return self.publish(0)
        if lost:
            self._forward(Forward.ANYWAY)
        self.accounting.redis_process = process
        published = self.publish(0)
        how = (
            "without some that was learned, which is in a checkpoint now" if lost else "perhaps without what came last"
        )
        text = f"Redis came back, {how}; its accounting is that of version {state.version}"
        self.incarnation.emit_event(text)
        _LOGGER.warning("%s", text)
        return published

    def _save_what_is_lost(self) -> None:
        """The present version becomes durable: what it comes from is in no log any more. A lineage begins with it."""
        state = self.state
        state.lineage = snapshot.Lineage(state.version, state.consumer.committed.position)
        state.save_durably("version", state.snapshot_of_lineage())

    def _forgets_what_is_lost(self, process: str) -> bool:
        """Replay buffers forget what the next trainer cannot read again; returns whether there was any. With fewer in
        them the same log leads to other weights, so the run continues as a new version then."""
        learner, archive = self.state.learner, self._role.archive()
        if {*learner.remembered} <= self.incarnation.with_store(lambda: readable(learner, archive)):
            return False
        self._forward(Forward.ANYWAY)  # before anything is archived from this Redis: the archive must name the hole
        self.accounting.redis_process = process
        self._restore_what_is_left(self.state.snapshot().checkpoint, "Redis lost what a replay buffer held", None)
        return True

    def _forward(self, mode: Forward) -> bool:
        """Version, credit and accounting of a Redis that knows less become what this trainer knows; returns whether its
        log holds all that was learned, and in the same order."""
        consumer, epoch = self.state.consumer, self.incarnation.epoch
        for through in (self.state.writer.trimmed, self._role.flow.read().trimmed_id):
            consumer.trimmed(through)  # it may be later than the last publication
        position, ledger = consumer.committed.position, Ledger.from_json(consumer.committed.ledger)
        taken = consumer.taken()
        self._forwards += 1
        same = fast_forward(
            self._role.redis, self._role.run_id, epoch, position, ledger, taken, mode,
            owner=self._role.flow.owner, number=self._forwards,
        )  # fmt: skip
        if mode is not Forward.COMPARE and (same or mode is Forward.ANYWAY):
            self._log.give_up(self.accounting.given_up)
        if not same and mode is Forward.ANYWAY:
            consumer.trimmed(position)
        return same


def _refuse_lost_checkpoints(role: RunContext) -> None:
    if role.flow.read().version >= 0:
        raise StoreUnavailable(
            f"run {role.run_id} has published policies, but the store holds no checkpoint of it; bring the store's "
            f"contents back, or start a new run"
        )


def _continuation(role: RunContext, checkpoint: Checkpoint, epoch: int) -> tuple[snapshot.Snapshot | None, str]:
    """Returns how to continue from a checkpoint, in words, with the snapshot to roll back to where that is needed."""
    flow, manifest, rolled = role.flow.read(), checkpoint.manifest, None
    trimmed = id_order(flow.trimmed_id) > id_order(manifest.log_position)
    if trimmed and flow.version >= manifest.version:  # what came after it cannot be learned any more
        rolled = rolled_back(role, checkpoint, epoch)
        how = f", but the log behind it is trimmed: continues as version {rolled.version}"
    elif flow.version < manifest.version:  # Redis is new, or lost this run's past, or some of it
        how = "; Redis knew nothing newer"
    else:
        how = f"; reading the log again up to version {flow.version}"
    return rolled, f"restored {manifest.name}{how}"


def _start_writer(
    incarnation: Incarnation, accounting: RedisAccounting, checkpoint: Checkpoint | None
) -> CheckpointWriter:
    version, env_steps, parent = 0, 0, 0
    if checkpoint is not None:
        manifest, provenance = checkpoint.manifest, checkpoint.manifest.provenance
        version, env_steps = manifest.version, provenance["counters"]["train"]["env_steps"]
        parent = provenance["policy_versions"][0]
    began = incarnation.epoch, version, env_steps, parent
    writer = CheckpointWriter.start(incarnation.role, began, incarnation.run_folder, lambda: accounting.redis_process)
    incarnation.closing.callback(writer.recorder.close)
    incarnation.closing.callback(writer.close)
    incarnation.profile.add("publishing", writer.timer)
    return writer


def last_epoch(checkpoints: CheckpointStore) -> int:
    """The epoch that wrote the store's pointer: a Redis that was rolled back may have forgotten it."""
    pointer = unless_damaged(checkpoints.pointer)
    return pointer.epoch if pointer else 0


def newest_checkpoint(checkpoints: CheckpointStore, client: redis.Redis) -> Checkpoint | None:
    """The newest good one, with an event for each that is passed over; None before the first."""
    try:
        checkpoint, problems = checkpoints.newest_good()
    except CheckpointNotFound:
        return None
    for problem in problems:
        emit(client, checkpoints.run_id, "trainer", f"{problem}; going back to {checkpoint.manifest.name}")
    tell_other_versions(client, checkpoint.manifest)
    return checkpoint


def tell_other_versions(client: redis.Redis, manifest: Manifest) -> None:
    """Reports a run that continues from a checkpoint of other code or libraries."""
    if said := snapshot.other_versions(manifest):
        _LOGGER.warning("%s", said)
        emit(client, manifest.run_id, "trainer", said)


def restore_learner(
    learner: Learner, checkpoint: Checkpoint, archive: Archive, log: ExperienceLog | None = None
) -> snapshot.Restored:
    """Restores the snapshot, and replay buffers from the archive and, if given, the log. May be called again. Raises
    `CheckpointDamaged`, and `ArchiveIncomplete` where some of the contents are in neither."""
    restored = snapshot.restore(learner, checkpoint)
    learner.recall(held(learner, archive, log))
    return restored


def held(learner: Learner, archive: Archive, log: ExperienceLog | None = None) -> Iterator[Fragment]:
    """Yields what its replay buffers hold, as logged, oldest first; raises `ArchiveIncomplete`."""
    positions = list(learner.remembered)
    if not positions:
        return
    entries = _entries(positions, archive, log)
    for position in positions:
        found = next((entry.fragment for entry in entries if entry.id == position and entry.fragment is not None), None)
        if found is None:
            raise ArchiveIncomplete(
                f"the replay buffer held the log's entry {position}, which is neither in the archive nor in Redis any "
                f"more; resume from a newer checkpoint, or train with archive=all"
            )
        yield fragment.decode(found)


def readable(learner: Learner, archive: Archive, log: ExperienceLog | None = None) -> set[str]:
    """Returns the log positions of replay buffers' contents that are in the archive or, if given, the log."""
    wanted = {*learner.remembered}
    if not wanted:
        return wanted
    there = _entries(list(learner.remembered), archive, log)
    return wanted & {entry.id for entry in there if entry.fragment is not None}


def _entries(positions: Sequence[str], archive: Archive, log: ExperienceLog | None) -> Iterator[LogEntry]:
    """All that was logged from the first position through the last one."""
    after, last = before(positions[0]), positions[-1]
    archived = max((segment.through for segment in archive.segments()), key=id_order, default=after)
    reach = min(archived, last, key=id_order)
    if id_order(reach) > id_order(after):
        yield from archive.entries(after, reach, holes=True)
        after = reach
    if log is not None:
        yield from log.between(after, last)
