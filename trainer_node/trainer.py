"""The trainer: a deterministic state machine over the experience log.

`run` reads: take the next K fragments, emulate acting on them, learn, publish the next policy version, checkpoint when
due; until the run is to end. What it learns depends on its snapshot and the log alone.
"""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path

import redis

from shared.checkpoint import Checkpoint
from shared.connection import hurry
from shared.departure import LEFT
from shared.errors import BodyLost, Fenced, RedisSetBack, StoreUnavailable, WaitTimeout
from shared.events import emit
from shared.experience_log import id_order
from shared.failure import Failure, RunEnd
from shared.flow import FlowState
from shared.fragment import Fragment
from shared.heartbeat import Heartbeat, insist
from shared.ledger import Ledger, set_forward
from shared.policies.codec import VersionHeader, encode_board, state_arrays
from shared.policy_board import PolicyBoard, Published
from shared.profile import Profile
from shared.quarantine import naming_entries
from shared.role import Role
from shared.steps import Phase, PhaseCounters
from trainer_node import snapshot
from trainer_node.beginning import last_epoch, newest_checkpoint
from trainer_node.ending import wait_for_evaluation, wait_for_exports, write_finished
from trainer_node.figures import Figures
from trainer_node.group import GroupBroken
from trainer_node.intake import Intake, RedisSettlement
from trainer_node.learner import make_learner, set_up_torch
from trainer_node.patient_log import PatientLog
from trainer_node.publisher import Publisher
from trainer_node.ranks import Alone, Lead
from trainer_node.rebase import rebased
from trainer_node.recollection import restore_whole
from trainer_node.rendezvous import Rendezvous, meet
from trainer_node.schedule import RunSchedule
from trainer_node.signals import Signals
from trainer_node.snapshot import Line, Progress, Snapshot

_LOGGER = logging.getLogger("stagecoach.trainer")
_LOOK_SECONDS = 1.0
"""How often a trainer that waits for experience looks whether the run is to end."""


class Trainer:
    """One trainer. `run` is its whole life; `step` is one turn of it, for the one-process mode."""

    def __init__(self, role: Role, run_folder: str | None) -> None:
        self._role = role
        self._config = role.config
        self._outage_seconds = role.config.store.retry_seconds
        self._board = PolicyBoard(role.redis, role.run_id)
        self._log = role.log()
        self._heartbeat = Heartbeat(role.redis, role.run_id, "trainer", "trainer")
        self._profile = Profile(role.checkpoints.store, "trainer", role.config.signals.profile)
        self._stages = self._profile.add("training", self._heartbeat.stages)
        self._schedule = RunSchedule(role.config)
        folder = Path(run_folder) / "signals" if run_folder and Path(run_folder).is_dir() else None
        self._signals = Signals(role.redis, role.run_id, role.config.signals, folder)
        self._figures = Figures(self._config)
        self._fragments: list[Fragment] = []
        self.version = -1
        self._counted: PhaseCounters | None = None
        """As of that version: what an update failed over was never trained on."""
        self._epoch = 0
        self._redis_process, self._redis_seen = "", 0.0
        """The Redis process that the books were matched with last; another one may have come back with less."""
        self._taken: Snapshot | None = None
        self._line = Line()
        self._parent: str | None = None
        self._parent_position, self._parent_version = "0-0", 0
        self._end: str | None = None
        self._reads_again = True
        """Whether it learns what a former trainer has learnt; nobody waits for that, and workers wait for credit."""
        self._ranks: Alone | Lead = Alone()
        self._started = False
        self.leaving = False
        """Its machine is taken away: it leaves after the present update."""

    def run(self) -> str:
        """Trains until the run is to end; answers the reason (solved, exhausted, stopped)."""
        self._role.check_config()  # a role that was started wrongly must not end the run as failed
        try:
            with self._stages.during("start"):
                self.start()
            while self._end is None and not self.leaving:
                self.step(_LOOK_SECONDS)
            return self.leave() if self._end is None else self.finish(self._end)
        except KeyboardInterrupt:  # asked twice, or its grace is over: the log has what is not durable
            return self._gone("at once")
        except Fenced as error:
            self._ranks.leave()
            self._heartbeat.stop(f"fenced: {error}", last_beat=False)  # the newer one beats under this name
            raise
        except GroupBroken as error:  # what the ranks were about to learn is in the log
            self._publisher.close()
            self._gone(f"with its broken group of ranks ({error})")
            raise
        except redis.RedisError as error:
            if self.leaving:  # the run waits for Redis, and so will the next one
                return self._gone(f"while Redis is away ({error})")
            self.fail(error)
            raise
        except Exception as error:
            self.fail(error)
            raise

    def start(self) -> None:
        """Fences older trainers, takes up the newest good checkpoint (or begins), and puts its version on the board."""
        self._role.check_config()
        set_up_torch(self._config.trainer)
        self._heartbeat.start()
        with self._heartbeat.waiting("the store", self._outage_seconds, outage=True) as wait:
            self._description = insist(wait, self._role.description)  # who cannot reach the store fences nobody
            last = insist(wait, lambda: last_epoch(self._role))
        self._epoch = self._role.flow.take_over(last)
        self._settlement = RedisSettlement(self._role, self._epoch)
        self._settlement.work.begin()
        self._learner = make_learner(self._config, self._description)
        self._know_redis()
        log = PatientLog(self._role, self._heartbeat, lambda: self.leaving)
        self._intake = Intake(self._role.run_id, self._config, self._description, log, self._settlement, self._stages)
        self._publisher = Publisher(self._role, self._epoch)
        self._profile.add("publishing", self._publisher.stages)
        self._publisher.start()
        with self._heartbeat.waiting("the store", self._outage_seconds, outage=True) as wait:
            checkpoint = insist(wait, lambda: newest_checkpoint(self._role))
            insist(wait, self._learner.read_demonstrations)
        if checkpoint is None:
            self._begin()
        else:
            self._recover(checkpoint)
        self._schedule.checkpointed(self._learner.counters)
        self._ranks = self._meet_ranks()
        self._signals.start(self._learner.counters.train.env_steps)
        self._tell()
        self._started = True
        _LOGGER.info("trainer of run %s: epoch %d, version %d", self._role.run_id, self._epoch, self.version)

    def step(self, wait_seconds: float) -> str:
        """One turn: `updated`, `waited` (fewer than K fragments so far) or `ended`."""
        with self._stages.during("look"):
            state = self._look()
        caught_up = self.version >= state.version  # else it still reads again what a former trainer has learnt
        self._reads_again = not caught_up
        ending = state.state != "running"
        if caught_up and (ending or self._schedule.exhausted(self._learner.counters)):
            return self._ends(state.reason if ending else "exhausted")
        try:
            if not self._gather(0.0 if ending else wait_seconds):
                return self._ends(state.reason) if ending else "waited"
        except RedisSetBack:
            self._redis_came_back()
            return "waited"
        except BodyLost as error:
            self._go_on_without(error)
            return "waited"
        fragments, self._fragments = self._fragments, []
        phase = self._phase
        first, last = fragments[0].position, fragments[-1].position
        self._settlement.taking(first, last)
        with naming_entries(self._role.run_id, first, last), self._ranks.turn(fragments, phase):
            with self._stages.during("observe"):
                self._learner.emulate_acting(fragments, phase)
            with self._stages.during("update"):
                metrics = self._learn(fragments, phase)
        self.version += 1
        with self._stages.during("publish"):
            published = self._publish(len(fragments))
        self._settlement.work.published(published.word)
        with self._stages.during("report"):
            self._report(fragments, metrics)
        with self._stages.during("checkpoint"):
            self._checkpoint_if_due(published)
        return "updated"

    def _ends(self, reason: str) -> str:
        self._end = reason
        return "ended"

    def save_last(self, reason: str) -> str:
        """Stops the acting and makes the last checkpoint durable; answers its name."""
        self._role.flow.set_state("stopping", reason, expected="running", epoch=self._epoch)
        self._ranks.close()
        last = self._snapshot()
        self._publisher.submit(last)
        with self._heartbeat.waiting("the last checkpoint to be durable", self._outage_seconds, outage=True):
            self._publisher.wait_idle(self._outage_seconds)
        return last.manifest.name

    def finish(self, reason: str) -> str:
        """The last checkpoint, its evaluation and export, `.finished`; answers the reason."""
        last = self.save_last(reason)
        wait_for_evaluation(self._role, self._heartbeat, last, reason)
        wait_for_exports(self._role, self._heartbeat, self._publisher)
        self._publisher.close()
        with self._heartbeat.waiting("the store to take the end of the run", self._outage_seconds, outage=True) as wait:
            insist(wait, lambda: self._publisher.finish(last))
            self._role.flow.set_state("finished", reason, epoch=self._epoch)
            insist(wait, lambda: self._write_finished(reason, last))
        self._heartbeat.stop(reason)
        self._profile.write()
        return reason

    def ask_to_leave(self) -> None:
        """From a signal handler: it leaves after the present update; at once where nothing has been learnt yet."""
        self.leaving = True
        hurry(self._role.redis)
        if self._heartbeat.waits and not self._started:
            raise KeyboardInterrupt

    def leave(self) -> str:
        """Makes what was learnt durable, within its grace, and goes; the run goes on with whoever takes over."""
        grace = self._config.trainer.grace_seconds
        self._publisher.submit(self._snapshot())
        self._ranks.close()
        try:
            with self._heartbeat.waiting("the last checkpoint to be durable", grace):
                self._publisher.wait_idle(grace)
        except WaitTimeout as error:
            return self._gone(f"without a last checkpoint ({error})")
        self._publisher.close()
        return self._gone("with a checkpoint")

    def _gone(self, how: str) -> str:
        """Says good-bye; what the publisher may still be writing is harmless, or refused by the next epoch."""
        with contextlib.suppress(redis.RedisError):
            if self._epoch:
                self._settlement.work.leave()
            emit(self._role.redis, self._role.run_id, "trainer", f"the trainer leaves {how}; the next one goes on")
        self._ranks.leave()
        self._heartbeat.stop("left: another trainer may take over")
        self._profile.write()
        return LEFT

    def fail(self, error: Exception) -> None:
        """Ends the run with `.finished: failed` and the diagnosis; checkpoints stay as they are.

        A trainer that never took over, or that was fenced since, has no right to end the run.
        """
        _LOGGER.exception("the trainer failed")
        self._ranks.leave()
        failure = Failure.of(error)
        end = RunEnd.failed(failure)
        try:
            if self._epoch > 0 and self._role.flow.holds(self._epoch):
                self._role.flow.set_state("finished", end.reason, epoch=self._epoch, failure=end.failure)
                self._write_finished(end.reason, None)
        except Exception:
            _LOGGER.exception("the failure could not be recorded in Redis or the store")
        if hasattr(self, "_publisher"):
            self._publisher.close()
        self._heartbeat.stop(failure.detail, failure=failure.kind)

    def _write_finished(self, reason: str, final: str | None) -> None:
        write_finished(self._role, reason, final, self.version, self._counted)

    # Beginning

    def _meet_ranks(self) -> Alone | Lead:
        """This trainer as rank 0 of a group of its epoch, where there are others and something is left to learn."""
        if self._config.trainer.ranks == 1:
            return Alone()

        def needless() -> bool:
            state = self._look()
            return state.state != "running" and self.version >= state.version

        with self._heartbeat.waiting("the other ranks", self._config.rollout.wait_deadline_seconds) as wait:
            group = meet(self._role, self._epoch, wait, needless)
        if group is None:
            return Alone()
        text = f"{group.size} ranks learn together over {group.backend}, in the group of epoch {self._epoch}"
        emit(self._role.redis, self._role.run_id, "trainer", text)
        rendezvous = Rendezvous(self._role)
        lead = Lead(group, self._learner, lambda: rendezvous.call(self._epoch))
        lead.begin(self._snapshot(), self._description)
        return lead

    def _begin(self) -> None:
        """Version 0, the untrained policy: first durable, then on the board."""
        if self._role.flow.read().version >= 0:
            raise StoreUnavailable(
                f"run {self._role.run_id} has published policies, but the store holds no checkpoint of it; bring the "
                f"store's contents back, or start a new run"
            )
        self.version = 0
        taken = self._snapshot()
        self._publisher.submit(taken)
        with self._heartbeat.waiting("the first checkpoint to be durable", self._outage_seconds, outage=True):
            self._publisher.wait_idle(self._outage_seconds)
        self._publish(0)
        self._remember_parent(taken.manifest.name, taken.manifest.log_position)

    def _recover(self, checkpoint: Checkpoint) -> None:
        """Snapshot + log: reads again what came after the snapshot, or, where the log has lost it, says so."""
        state, name = self._role.flow.read(), checkpoint.manifest.name
        trimmed = id_order(state.trimmed_id) > id_order(checkpoint.manifest.log_position)
        if trimmed and state.version >= checkpoint.manifest.version:  # what came after it can be learnt no more
            text = f"restored {name}, but the log behind it is trimmed: goes on as version "
            checkpoint = self._rebase(checkpoint)
            text += str(checkpoint.manifest.version)
        elif state.version < checkpoint.manifest.version:  # Redis is new, or lost this run's past, or some of it
            text = f"restored {name}; Redis knew nothing newer"
        else:
            text = f"restored {name}; reading the log again up to version {state.version}"
        self._take_up(checkpoint, text)

    def _take_up(self, checkpoint: Checkpoint, text: str) -> None:
        """Goes on from there; a Redis that knows less is set forward to it."""
        with self._heartbeat.waiting("the store", self._outage_seconds, outage=True) as wait:
            restored = insist(wait, lambda: restore_whole(self._learner, checkpoint, self._role.archive(), self._log))
        self.version, self._line = restored.version, restored.line
        self._remember_parent(checkpoint.manifest.name, restored.books.position)
        self._intake.restore(restored.books)
        if self._role.flow.read().version < self.version:
            self._set_redis_forward()
        emit(self._role.redis, self._role.run_id, "trainer", text)
        self._publisher.submit(self._snapshot())  # where the store knows it: completes what a crash left undone

    def _go_on_without(self, error: BodyLost) -> None:
        """What a former trainer learnt from cannot be read again: as far as this one came goes on as a new version."""
        self._fragments.clear()
        reached = self._snapshot()
        checkpoint = self._rebase(Checkpoint(reached.manifest, reached.objects))
        text = f"{error}: {reached.manifest.name} goes on as version {checkpoint.manifest.version}"
        self._take_up(checkpoint, text)

    def _rebase(self, checkpoint: Checkpoint) -> Checkpoint:
        """An older checkpoint as the newest version, durable before anybody acts with it; none goes back."""
        taken = self._made_durable(rebased(self._role, checkpoint, self._epoch))
        return Checkpoint(taken.manifest, taken.objects)

    def _know_redis(self) -> None:
        """From now on the books are those of this Redis process; whatever it has lost, it had lost before."""
        self._redis_process, self._redis_seen = self._role.flow.process(), time.monotonic()
        self._settlement.process = self._redis_process

    def _redis_restarted(self) -> bool:
        """Whether this is another Redis process than before: it may have come back without what came last."""
        if time.monotonic() - self._redis_seen < _LOOK_SECONDS:
            return False
        self._redis_seen = time.monotonic()
        return self._role.flow.process() != self._redis_process

    def _redis_came_back(self) -> Published:
        """Redis came back with less than it had (its file is synced each second): the trainer knows better."""
        self._know_redis()
        if not self._role.flow.holds(self._epoch):
            raise Fenced(f"epoch {self._epoch}: a newer trainer has taken over")
        self._fragments.clear()
        self._intake.restore(self._intake.committed)
        if self._role.flow.read().version > self.version:  # it has all that this trainer has come to in reading again
            return self._publish(0)
        position = self._intake.committed.position
        if not self._log.holds(position) and (self._taken is None or self._taken.manifest.version < self.version):
            self._line = Line(self.version, position)  # learnt, and in no log any more
            self._publisher.submit(self._snapshot())
        published = self._set_redis_forward()
        text = f"Redis came back, perhaps without what came last; its books are those of version {self.version}"
        emit(self._role.redis, self._role.run_id, "trainer", text)
        _LOGGER.warning("%s", text)
        return published

    def _set_redis_forward(self) -> Published:
        """Version, credit and books of a Redis that knows less than this trainer become what the trainer knows."""
        books = self._intake.committed
        set_forward(self._role.redis, self._role.run_id, self._epoch, books.position, Ledger.from_json(books.ledger))
        self._log.give_up(self._settlement.given_up)
        return self._publish(0)

    # One turn

    @property
    def _phase(self) -> Phase:
        return self._schedule.phase(self._learner.counters)

    def _look(self) -> FlowState:
        """What everyone else did meanwhile: took over, came back with less, or waits for room."""
        state = self._role.flow.read()
        if state.epoch > self._epoch:
            raise Fenced(f"epoch {self._epoch}: a newer trainer has taken over, that of epoch {state.epoch}")
        if state.epoch < self._epoch or state.version < self.version or self._redis_restarted():
            self._redis_came_back()
        full = state.memory_full or self._schedule.log_half_full(state.log_bytes)
        if full and self._parent_version < self.version:  # else nobody could go on: what is learnt fills it
            self._checkpoint()
        return state

    def _gather(self, wait_seconds: float) -> bool:
        """Whether K fragments are there; waits for more, by name, while the run goes on."""
        needed = self._config.rollout.fragments_per_update
        while len(self._fragments) < needed:
            taken = self._intake.take(self.version, self._phase, 0.0)
            if taken is None and wait_seconds > 0:
                taken = self._wait_for_experience(wait_seconds)
            if taken is None:
                return False
            self._fragments.append(taken)
        return True

    def _wait_for_experience(self, look_seconds: float) -> Fragment | None:
        self._settlement.taking()
        with self._heartbeat.waiting("experience", self._config.rollout.wait_deadline_seconds) as wait:
            while True:
                taken = self._intake.take(self.version, self._phase, look_seconds)
                if taken is not None or self.leaving or self._look().state != "running":
                    return taken
                wait.check()

    def _learn(self, fragments: list[Fragment], phase: Phase) -> dict[str, float]:
        started = time.perf_counter()
        metrics = self._learner.learn(fragments, phase)
        self._figures.learning_seconds += time.perf_counter() - started
        return metrics

    def _publish(self, consumed: int) -> Published:
        """The new version on the board, with the credit and the ledger, in one step."""
        self._intake.commit()
        books = self._intake.committed
        header = VersionHeader(self.version, self._phase, self._learner.counters)
        blob, name = b"", ""
        if self._config.policy_versions.transport == "object_store":
            taken = self._made_durable(self._snapshot())
            name = taken.manifest.name
            self._checkpointed(taken)
        else:
            blob = encode_board({id_: state_arrays(policy) for id_, policy in self._learner.policies.items()}, header)
        try:
            return self._board.publish(
                epoch=self._epoch, version=self.version, consumed=consumed, settled_id=books.position,
                ledger=self._intake.ledger, header=header, blob=blob, checkpoint=name, process=self._redis_process,
            )  # fmt: skip
        except RedisSetBack:
            return self._redis_came_back()

    def _made_durable(self, taken: Snapshot) -> Snapshot:
        self._publisher.submit(taken)
        with self._heartbeat.waiting("the policy version to be durable", self._outage_seconds, outage=True):
            self._publisher.wait_idle(self._outage_seconds)
        return taken

    def _checkpoint_if_due(self, published: Published) -> None:
        if self._publisher.failure is not None:
            raise self._publisher.failure
        if self._schedule.checkpoint_due(self._learner.counters, published.log_bytes):
            self._checkpoint()

    def _checkpoint(self) -> None:
        taken = self._snapshot()
        self._publisher.submit(taken)
        self._checkpointed(taken)

    def _checkpointed(self, taken: Snapshot) -> None:
        self._schedule.checkpointed(self._learner.counters)
        self._remember_parent(taken.name, taken.log_position)

    def _remember_parent(self, name: str, position: str) -> None:
        self._parent, self._parent_position, self._parent_version = name, position, self.version

    def _snapshot(self) -> Snapshot:
        """Taken once per version: a checkpoint that is due and the last one may fall together."""
        if self._taken is None or self._taken.version != self.version:
            progress = Progress(
                self.version, self._phase, self._epoch, self._parent, self._parent_position, self._parent_version,
                self._line,
            )  # fmt: skip
            self._taken = snapshot.take(
                self._learner, self._description, self._config, self._role.run_id, progress, self._intake.committed
            )
        return self._taken

    def _report(self, fragments: list[Fragment], metrics: dict[str, float]) -> None:
        figures = self._figures.row(self._learner, fragments, metrics, self.version, self._heartbeat.waited_seconds)
        self._signals.write(figures, self._learner.counters.train.env_steps)
        self._tell()

    def _tell(self) -> None:
        self._counted = PhaseCounters.from_dict(self._learner.counters.as_dict())
        train = self._learner.counters.train
        self._heartbeat.progress = {
            "epoch": self._epoch, "version": self.version, "phase": self._phase.value,
            "reads_again": self._reads_again, "env_steps": train.env_steps,
            "updates": train.updates, "episodes": train.episodes,
            "learn_seconds": round(self._figures.learning_seconds, 3),
        }  # fmt: skip
