"""The trainer: a deterministic state machine over the experience log.

`step` reads: collect the next K fragments, emulate acting on them, learn, publish the next policy version, report,
checkpoint when due. What it learns depends on its snapshot and the log alone. recovery/recovery.py leads to
the first step, recovery/incarnation.py has the ends.
"""

import logging
from enum import StrEnum
from typing import Self

from stagecoach.shared.base import world
from stagecoach.shared.base.errors import BodyLost, Fenced, RedisRolledBack, VersionsDiverged, WaitTimeout
from stagecoach.shared.base.failure import EndReason
from stagecoach.shared.base.printable import counted
from stagecoach.shared.experience.fragment import Fragment
from stagecoach.shared.protocol.events import read_evaluations
from stagecoach.shared.protocol.flow_control import FlowState, RunState
from stagecoach.shared.protocol.heartbeat import poll, read_heartbeats, retry_until_deadline
from stagecoach.shared.protocol.policy_board import Published
from stagecoach.shared.protocol.quarantine import naming_entries
from stagecoach.shared.storage.metric_log import EPISODES, TRAIN
from stagecoach.trainer_node.distributed.leader import meet_followers
from stagecoach.trainer_node.learning.learner import set_up_torch, turns_lost
from stagecoach.trainer_node.metrics.update_metrics import LENGTH, RETURN, UpdateMetrics, episode_rows, lag_buckets
from stagecoach.trainer_node.recovery.incarnation import Incarnation
from stagecoach.trainer_node.recovery.recovery import Recovery, held

_LOGGER = logging.getLogger("stagecoach.trainer")
_POLL_SECONDS = 1.0
"""Seconds between two looks at the run's state while the trainer waits for experience."""
_WRITERS_SECONDS = 60.0
"""Seconds that the end of a run waits for slow metric writers."""
_REPLACED_SECONDS = 20.0
"""Seconds that the end of a run waits for an evaluator in place of one that is gone."""


class StepResult(StrEnum):
    UPDATED = "updated"
    WAITED = "waited"
    """Fewer than K fragments are there so far."""
    ENDED = "ended"


class Trainer:
    """The loop of one incarnation of the trainer, from its recovered state on."""

    def __init__(self, recovery: Recovery, orders: int) -> None:
        self.incarnation, self.recovery, self.state = recovery.incarnation, recovery, recovery.state
        incarnation, role = self.incarnation, self.incarnation.role
        self.learner, self.consumer, self.schedule = self.state.learner, self.state.consumer, self.state.schedule
        self._config, self._flow, self._run_id = role.config, role.flow, role.run_id
        self._heartbeat, self._stages = incarnation.heartbeat, incarnation.stages
        self._metrics = UpdateMetrics(role.config, self.learner, self.state.description)
        self.recorder = self.state.writer.recorder
        self._orders = orders
        """Number of orders for a checkpoint that were carried out, or came before this trainer."""
        self._catching_up = True
        """True while it repeats what an earlier trainer learned, when workers wait for credit."""
        self.end_reason = ""
        """Reason why the run ends, once it does."""

    @classmethod
    def start(cls, incarnation: Incarnation) -> Self:
        """A trainer whose state is recovered, and whose policy version is on the board."""
        incarnation.role.check_config()
        set_up_torch(incarnation.role.config.trainer)
        orders = incarnation.role.flow.read().checkpoint_orders  # what comes while it recovers is for this trainer
        trainer = cls(Recovery.start(incarnation), orders)
        if not trainer.version and (lost := turns_lost(trainer._config, trainer.state.description)):
            incarnation.emit_event(lost)
        trainer._meet_followers()
        trainer._tell()
        incarnation.learns = True
        _LOGGER.info("trainer of run %s: epoch %d, version %d", trainer._run_id, incarnation.epoch, trainer.version)
        return trainer

    @property
    def version(self) -> int:
        return self.state.version

    def run(self) -> str:
        """Trains until the run is to end; returns the reason (solved, exhausted, stopped), or `preempted`."""
        while not self.end_reason and not self.incarnation.shutdown_requested:
            self.step(_POLL_SECONDS)
        return self.finish(self.end_reason) if self.end_reason else self.leave()

    def step(self, wait_seconds: float) -> StepResult:
        with self._stages.during("look"):
            flow = self.poll()
        caught_up = self.version >= flow.version
        self._catching_up = not caught_up
        ending = flow.state is not RunState.RUNNING
        if caught_up and (ending or self.schedule.exhausted(self.learner.counters)):
            self.end_reason = flow.reason if ending else EndReason.EXHAUSTED
            return StepResult.ENDED
        try:
            if not self.collect(0.0 if ending or not caught_up else wait_seconds):
                if not caught_up and self._log_ends_before_version():
                    raise VersionsDiverged(f"the log ends behind version {self.version}, and Redis knows a newer one")
                self.end_reason = flow.reason if ending else ""
                return StepResult.ENDED if ending else StepResult.WAITED
        except RedisRolledBack:
            self.recovery.redis_came_back()
            return StepResult.WAITED
        except (BodyLost, VersionsDiverged) as error:
            self.recovery.continue_without(error)
            return StepResult.WAITED
        (fragments, self.consumer.batch), phase = (self.consumer.batch, []), self.state.phase
        first, last = fragments[0].position, fragments[-1].position
        self.recovery.accounting.taking(first, last)
        with naming_entries(self._run_id, first, last), self.incarnation.ranks.turn(fragments, phase):
            with self._stages.during("observe"):
                self._metrics.see(fragments)
                self.learner.emulate_acting(fragments, phase)
            with self._stages.during("update"):
                started = world.monotonic()
                metrics = self.learner.learn(fragments, phase)
                self._metrics.learning_seconds += world.monotonic() - started
        self.state.version += 1
        with self._stages.during("report"):  # before there can be a checkpoint of this version, which covers it
            with self.recorder.continuing("the metrics of an update"):
                self._record(fragments, metrics)
            if self.schedule.evaluation_due(self.learner.counters):
                self.state.submit_evaluation()
        with self._stages.during("publish"):
            published = self.recovery.publish(len(fragments))
        self.recovery.accounting.published(published.reply)
        self._tell()
        with self._stages.during("checkpoint"):
            self._checkpoint_if_due(published)
        return StepResult.UPDATED

    def _checkpoint_if_due(self, published: Published) -> None:
        self.state.writer.raise_failure()
        if self.schedule.checkpoint_due(self.learner.counters, published.log_bytes):
            self.state.checkpoint()

    def _record(self, fragments: list[Fragment], metrics: dict[str, float]) -> None:
        self._metrics.take(fragments, metrics, self.version)
        if self._config.metrics.episodes:
            for worker, row in episode_rows(fragments, self.learner.counters.train.env_steps, self.version):
                self.recorder.record(EPISODES, row, worker)
        for fold in self.learner.folds:
            for text in fold.drain_events():
                self.incarnation.emit_event(text, fold.name)
        if self._metrics.due(self.learner):
            self.recorder.record(TRAIN, self._metrics.row(self.learner, self.version, self._heartbeat.waited_seconds))
            episodes, env_steps = self.learner.episodes, self.learner.counters.train.env_steps
            self.recorder.histogram(RETURN, [record.episode_return for record in episodes], env_steps)
            self.recorder.histogram(LENGTH, [record.length for record in episodes], env_steps)

    def poll(self) -> FlowState:
        """The run's state; makes up for a Redis that came back with less, and makes room where it is full."""
        flow, epoch = self._flow.read(), self.incarnation.epoch
        if flow.epoch > epoch:
            raise Fenced(f"epoch {epoch}: a newer trainer has taken over, that of epoch {flow.epoch}")
        if flow.epoch < epoch or flow.version < self.version or self.recovery.redis_restarted():
            self.recovery.redis_came_back()
        if flow.version == self.version and self.state.board_lost:
            self.recovery.publish(0)
        self._orders = min(self._orders, flow.checkpoint_orders)  # less after a Redis that was rolled back
        due = flow.checkpoint_orders > self._orders or flow.memory_full or self.schedule.log_half_full(flow.log_bytes)
        if due and self.state.parent.version < self.version:  # an order waits until there is something new
            self._orders = flow.checkpoint_orders
            self.state.checkpoint()
        return flow

    def _log_ends_before_version(self) -> bool:
        """Returns whether the log has ended, though a version on the board was learned from what came next."""
        return self._flow.read().version > self.version and self.incarnation.log.ends_at(self.consumer.position)

    def collect(self, wait_seconds: float) -> bool:
        """Returns whether K fragments of one Redis process are there; waits for more while the run is running."""
        at_once = not self.consumer.batch
        while len(self.consumer.batch) < self._config.rollout.fragments_per_update:
            taken = self.consumer.take(self.version, self.state.phase, 0.0)
            if taken is None and wait_seconds > 0:
                taken, at_once = self._wait_for_experience(wait_seconds), False
            if taken is None:
                return False
            self.consumer.batch.append(taken)
        if not at_once and self.recovery.redis_restarted(0.0):
            raise RedisRolledBack("Redis came back while a batch was incomplete: the batch starts over")
        return True

    def _wait_for_experience(self, poll_seconds: float) -> Fragment | None:
        self.recovery.accounting.taking()
        config = self._config
        external = config.environment.api == "external"  # whose clients may be off for a weekend
        seconds = config.gateway.idle_seconds if external else config.rollout.wait_deadline_seconds
        with self._heartbeat.waiting("experience", seconds) as wait:
            while True:
                taken = self.consumer.take(self.version, self.state.phase, poll_seconds)
                if taken or self.incarnation.shutdown_requested or self.poll().state is not RunState.RUNNING:
                    return taken
                wait.check()

    def _tell(self) -> None:
        counters = self.learner.counters
        self.incarnation.version, self.incarnation.counters = self.version, self._counted()
        self._heartbeat.progress = {
            "epoch": self.incarnation.epoch, "version": self.version, "phase": self.state.phase.value,
            "reads_again": self._catching_up, "env_steps": counters.train.env_steps,
            "updates": counters.train.updates, "episodes": counters.train.episodes, **self.recorder.tested,
            "learn_seconds": round(self._metrics.learning_seconds, 3), "lags": lag_buckets(self.consumer.lags),
        }  # fmt: skip

    def _counted(self) -> dict[str, dict[str, int]]:
        """Counters by phase; evaluation is in no other one than `test`, and nothing that is learned depends on it."""
        played = {name.removeprefix("test_"): count for name, count in self.recorder.tested.items()}
        return self.learner.counters.as_dict() | {"test": played}

    def _meet_followers(self) -> None:
        """Rank 0 of a group of its epoch, where there are other ranks and something is left to learn."""
        client, epoch = self.incarnation.role.redis, self.incarnation.epoch

        def needless() -> bool:
            flow = self.poll()
            return flow.state is not RunState.RUNNING and self.version >= flow.version

        if self._config.trainer.ranks == 1:
            return
        with self._heartbeat.waiting("the other ranks", self._config.rollout.wait_deadline_seconds) as wait:
            leader = meet_followers(client, self._run_id, epoch, self.learner, self._config.trainer, wait, needless)
        if leader is not None:
            self.incarnation.ranks = leader
            text = f"{leader.size} ranks learn together over {leader.backend}, in the group of epoch {epoch}"
            self.incarnation.emit_event(text)
            taken, archive, log = self.state.snapshot(), self.incarnation.role.archive(), self.incarnation.log
            self.incarnation.with_store(
                lambda: leader.begin(taken, self.state.description, held(self.learner, archive, log))
            )

    def save_last(self, reason: str) -> str:
        """Stops the acting and makes the last checkpoint durable; returns its name."""
        self._flow.set_state(RunState.STOPPING, reason, expected=RunState.RUNNING, epoch=self.incarnation.epoch)
        self.incarnation.ranks.close()
        return self.state.save_durably("last").name

    def finish(self, reason: str) -> str:
        """The last checkpoint, its evaluation, `.finished`; returns the reason."""
        writer, seconds = self.state.writer, self.incarnation.outage_seconds
        last = self.save_last(reason)
        if reason in (EndReason.SOLVED, EndReason.EXHAUSTED):  # a person who stops the run does not wait for it
            self._wait_for_evaluation(last)
        if missed := writer.due.names - read_evaluations(self.incarnation.role.redis, self._run_id).keys():
            due = f"{counted(len(missed), 'policy version')} due by evaluation.every={self._config.evaluation.every}"
            self.incarnation.emit_event(f"{due} had not been played when the run ended", "evaluation")
        writer.close()
        with self._heartbeat.waiting("the store to take the end of the run", seconds, outage=True) as wait:
            retry_until_deadline(wait, lambda: writer.finish(last))
            self._flow.set_state(RunState.FINISHED, reason, epoch=self.incarnation.epoch)
            self.incarnation.version, self.incarnation.counters = self.version, self._counted()
            retry_until_deadline(wait, lambda: self.incarnation.write_finished(reason, last))
            retry_until_deadline(wait, self.recorder.store)
            writer.tidy()
        with self._heartbeat.waiting("the metric writers", _WRITERS_SECONDS):
            self.recorder.close(_WRITERS_SECONDS)
        return self.incarnation.finished(reason)

    def _wait_for_evaluation(self, name: str) -> None:
        """The final score belongs into the summary, where there is an evaluator to give it, and so does what is due."""
        if not self._config.evaluation.enabled:
            return
        client, seen = self.incarnation.role.redis, world.monotonic()

        def done() -> bool:
            nonlocal seen
            beats, done = read_heartbeats(client, self._run_id), read_evaluations(client, self._run_id)
            left = {name, *self.state.writer.due.names} - done.keys()
            if any(beat.alive for beat in beats if beat.role == "evaluator"):
                seen = world.monotonic()
                return not left
            # it is replaced, or about to start
            known = any(beat.role == "evaluator" or (beat.role == "coordinator" and beat.alive) for beat in beats)
            return not (left and known and world.monotonic() - seen < _REPLACED_SECONDS)

        try:
            with self._heartbeat.waiting("the last evaluation", self._config.evaluation.final_wait_seconds) as wait:
                poll(wait, done)
            if name not in read_evaluations(client, self._run_id):
                self.incarnation.emit_event(f"{name} is not evaluated: no evaluator is running", "evaluation")
        except WaitTimeout as error:
            self.incarnation.emit_event(f"{name} is not evaluated: {error}", "evaluation")

    def leave(self) -> str:
        """Makes what was learned durable, within its grace, and leaves the run to the next one; returns `preempted`."""
        grace = self._config.trainer.grace_seconds
        self.state.writer.submit(self.state.snapshot())
        self.incarnation.ranks.close()
        try:
            with self._heartbeat.waiting("the last checkpoint to be durable", grace):
                self.state.writer.wait_idle(grace)
        except WaitTimeout as error:
            return self.incarnation.preempted(f"without a last checkpoint ({error})")
        self.incarnation.closing.close()
        return self.incarnation.preempted("with a checkpoint")
