"""The fleet: Ray actors for the trainer, the evaluator and the rollout workers; started, watched, replaced, scaled.

A role whose process died, raised, or left on purpose gets another one as long as it makes progress (a worker registers
as a new incarnation). The run ends where the trainer ends or fails.
"""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import ray
import ray.exceptions

from stagecoach.coordinator.fleet.autoscaler import Scaling
from stagecoach.coordinator.fleet.capacity import (
    ClusterView,
    evaluator_options,
    needs,
    total_resources,
    trainer_options,
)
from stagecoach.coordinator.fleet.managed_actor import POLL_SECONDS, ManagedActor, how_it_died, how_it_ended, kill_here
from stagecoach.coordinator.fleet.role_actor import RoleActor
from stagecoach.coordinator.fleet.worker_pool import WorkerPool
from stagecoach.coordinator.services.ray_head import RayHead
from stagecoach.shared.base import world
from stagecoach.shared.base.errors import StagecoachError
from stagecoach.shared.base.failure import Failure, FailureKind, RoleEnd, RunEnd
from stagecoach.shared.base.printable import counted
from stagecoach.shared.base.process import ExitDiagnostics
from stagecoach.shared.protocol.events import emit
from stagecoach.shared.protocol.flow_control import FlowState, RunState
from stagecoach.shared.protocol.heartbeat import BEAT_SECONDS, Beat, Heartbeat, read_heartbeats
from stagecoach.shared.protocol.redis_client import retries
from stagecoach.shared.runtime.launch import RoleLaunch
from stagecoach.shared.runtime.restarts import Progress, RestartBound, evaluation_progress, learning_progress
from stagecoach.shared.runtime.role_process import RoleExit
from stagecoach.shared.runtime.run_context import RunContext
from stagecoach.trainer_node.distributed.leader import rank_id

_READING_SHARE = 0.1
"""Share of the processor that reading heartbeats may take; ten thousand of them take a tenth of a second."""
_OTHERS_FIRST_SECONDS = 15.0
"""The evaluator waits this long for the others: it has nothing to do before, and they need the cores."""
_LOGGER = logging.getLogger("stagecoach.coordinator")


class RayLost(StagecoachError):
    """Embedded Ray has died or hung, and all actors with it."""


class FleetSupervisor:
    """Runs one fleet after another: an embedded Ray that dies or hangs is restarted, with a new fleet on it.

    The roles of the dead Ray end with it; new roles continue from the newest checkpoint and the log.
    """

    def __init__(self, context: RunContext, launch: RoleLaunch, head: RayHead, added_machines: float) -> None:
        self._redis, self._run_id, self._head, self._generation = context.redis, context.run_id, head, head.generation
        self._make_fleet = partial(Fleet, context, launch, head, added_machines)
        self._bound = RestartBound(context.config.rollout.restarts_allowed)
        self._bound.record_progress(learning_progress(self._redis, self._run_id))
        self._fleet: Fleet | None = self._make_fleet()

    def run(self, abandon: world.Event) -> RunEnd:
        """Supervises fleets until the run ends; returns the reason. Raises Ray's error if Ray keeps dying."""
        while True:
            try:
                self._fleet = self._fleet or self._make_fleet()
                return self._fleet.run(abandon)
            except Exception as error:
                if abandon.is_set():
                    return RunEnd("abandoned")
                if not self._head.lost(self._generation, notice=True):
                    raise
                self._fleet = None
                self._restart_ray(error)

    def kill(self) -> None:
        if self._fleet is not None and not self._head.lost(self._generation):
            self._fleet.kill()

    def _restart_ray(self, error: Exception) -> None:
        text = self._head.failure
        self._bound.record_progress(learning_progress(self._redis, self._run_id))
        if self._bound.ended():
            often = f"{counted(self._bound.ends, 'time')} in a row without progress of the run"
            raise RayLost(f"{text}, {often} (rollout.restarts_allowed); see its log") from error
        _LOGGER.warning("%s; starting it again", text)
        emit(self._redis, self._run_id, "service", f"{text}; it is started again, with new roles")
        try:
            self._generation = self._head.start_again(self._generation)
        except StagecoachError as failed:
            if not self._head.lost(self._generation):
                raise
            _LOGGER.warning("Ray does not start again: %s", failed)


class Fleet:
    """All actors of one run. `run` is the coordinator's loop, `reconcile` one turn of it."""

    def __init__(self, context: RunContext, launch: RoleLaunch, head: RayHead, added_machines: float) -> None:
        self._config, self._launch = context.config, launch.encoded()
        self._head, self._generation = head, head.generation
        self._redis, self._run_id, self._flow = context.redis, context.run_id, context.flow
        self._cluster = ClusterView(context.config, added_machines, head.embedded)
        self._scaling = Scaling(context, os.cpu_count() if context.config.ray.address == "embedded" else None)
        self._waits_for: str | None = None
        """The service that is away, as the roles say."""
        self._next_read = 0.0
        self._beats: Mapping[str, Beat] = {}
        self._read_beats()  # those of a fleet before this one
        learning = partial(learning_progress, self._redis, self._run_id)
        options = partial(trainer_options, self._config)
        self._trainer = self._start("trainer", learning, options)
        self._learners = [self._trainer]
        for rank in range(1, self._config.trainer.ranks):
            self._learners.append(self._start(rank_id(rank), learning, options))
        self._evaluator: ManagedActor | None = None
        self._first_version: int | None = None
        """The version with which this fleet began."""
        self._workers = WorkerPool(context, self._start)
        self._began = world.monotonic()
        self._heartbeat = Heartbeat(self._redis, self._run_id, "coordinator", "coordinator")
        self.outcome: RunEnd | None = None

    def run(self, abandon: world.Event) -> RunEnd:
        """Supervises the roles until the trainer has ended; returns why. Raises `RayLost`."""
        self._heartbeat.start()
        try:
            while self.outcome is None:
                if abandon.is_set():
                    self.kill()
                    return RunEnd("abandoned")
                if self._head.lost(self._generation):
                    raise RayLost(self._head.failure)
                self.reconcile()
            self.close()
            return self.outcome
        finally:
            self._heartbeat.stop(self.outcome.reason if self.outcome else "ended")

    def reconcile(self) -> None:
        """One turn: which call has ended, which roles must be restarted, how many workers there should be."""
        for member in self._members():
            if member.restart_at is not None and world.monotonic() >= member.restart_at:
                member.restart()
        self._handle_an_end()
        if self.outcome is not None:
            return
        beats, flow = self._read_beats(), self._flow.read()
        self._start_evaluator(flow)
        for member in self._members():
            self._replace_if_silent(member, beats.get(member.name))
        self._check_placement(beats)
        self._report_outages(beats)
        self._follow_flow(flow, beats)

    def close(self, seconds: float = 20.0) -> None:
        """Waits for workers and evaluator to end on their own, then ends their processes.

        A role that has never said anything has no process yet, and perhaps never will.
        """
        others = [member for member in self._members() if member.stamp and member is not self._trainer]
        if calls := {member.call: member.name for member in others if member.call is not None}:
            _, left = ray.wait(list(calls), num_returns=len(calls), timeout=seconds)
            if left:
                names = ", ".join(sorted(calls[call] for call in left))
                text = f"{names}: did not end within {seconds:g} s; killed; perhaps an environment hangs in close()"
                emit(self._redis, self._run_id, "worker", text)
        self.kill()

    def kill(self) -> None:
        for member in self._members():
            ray.kill(member.actor, no_restart=True)

    # Starting

    def _members(self) -> list[ManagedActor]:
        evaluator = [] if self._evaluator is None else [self._evaluator]
        return [*self._learners, *evaluator, *self._workers.members]

    def _start(
        self, name: str, progress: Callable[[], Progress], options: Callable[[], dict[str, Any]]
    ) -> ManagedActor:
        bound, last = RestartBound(self._config.rollout.restarts_allowed), self._beats.get(name)
        former = {last.process} if last else set()

        def make() -> Any:
            # unnamed: Ray asks the GCS whether a name is free, and that call never returns if the GCS dies meanwhile
            return RoleActor.options(**options()).remote(name, self._launch, self._head.zygote.token)

        return ManagedActor(name, make, bound, progress, retries(self._redis).outages, former)

    def _start_evaluator(self, flow: FlowState) -> None:
        """Starts the evaluator once the others have learned something, or take too long."""
        if self._evaluator is not None or not self._config.evaluation.enabled:
            return
        if self._first_version is None:
            self._first_version = max(flow.version, 0)  # version 0 has learned nothing
        if flow.version > self._first_version or world.monotonic() - self._began > _OTHERS_FIRST_SECONDS:
            progress = partial(evaluation_progress, self._redis, self._run_id)
            options = partial(evaluator_options, self._config)
            self._evaluator = self._start("evaluator", progress, options)

    # What has ended

    def _handle_an_end(self) -> None:
        """Waits a moment for a call of `run` to end, and handles that; raises `RayLost` where it went with its Ray."""
        calls = {member.call: member for member in self._members() if member.call is not None}
        if not calls:
            world.sleep(POLL_SECONDS)
            return
        for call in ray.wait(list(calls), num_returns=1, timeout=POLL_SECONDS)[0]:
            member = calls[call]
            try:
                found: RoleExit = ray.get(call)
            except ray.exceptions.RayError as caught:
                if self._head.lost(self._generation, notice=True):
                    raise RayLost(self._head.failure) from caught
                self._restart_after_failure(member, self._death(member, how_it_died(caught)), actor_died=True)
                continue
            if found.failure is not None:
                _LOGGER.error("%s failed: %s", member.name, found.trace)
                self._handle_failure(member, found.failure, found.fenced)
            elif found.died is not None:
                how = how_it_ended(found.pid, found.died)
                self._restart_after_failure(member, self._death(member, (how, found.died)))
            else:
                self._handle_return(member, found.reason)

    def _handle_return(self, member: ManagedActor, reason: str) -> None:
        if reason in (RoleEnd.PREEMPTED, RoleEnd.OUTGROWN):
            pause = member.pause_seconds()  # leaving on purpose is no failure, but may not happen too often
            later = f" in {pause:.0f} s" if pause else ""
            self._emit(member, f"{member.name} {reason}; it continues in a new process{later}")
            member.leave(world.monotonic() + pause)
        elif member is self._evaluator or member in self._learners:
            member.call = None
            if member is self._trainer:
                self.outcome = RunEnd(reason, self._flow.read().failure)
        else:
            self._workers.remove(member)

    def _handle_failure(self, member: ManagedActor, failure: Failure, fenced: bool) -> None:
        if member is not self._trainer or failure.kind is FailureKind.RESOURCES:
            self._restart_after_failure(member, failure)
            return
        member.call = None
        if fenced:
            self._emit(member, "another trainer has taken over; the fleet works on for it")
        else:
            self.outcome = RunEnd.failed(failure)

    def _death(self, member: ManagedActor, end: tuple[str, ExitDiagnostics]) -> Failure:
        """Explains a process's death by its watchdog's report, else by its exit and last output.

        A process that ended itself did what was run in it: in a worker or the evaluator that is the environment.
        """
        last = member.last_beat(read_heartbeats(self._redis, self._run_id))
        if last is not None and last.failure is not None:
            return Failure(last.failure, last.ended or "failed")
        how, words = end
        _LOGGER.warning("%s: %s%s", member.name, how, "".join(f"\n  {line}" for line in words.lines))
        of_itself = words.how is not None and member.role in ("evaluator", "worker")
        said = f"; it said last: {' | '.join(line.strip() for line in words.lines)}" if words.lines else ""
        return Failure(FailureKind.ENVIRONMENT if of_itself else FailureKind.OTHER, f"{member.name}: {how}{said}")

    def _restart_after_failure(self, member: ManagedActor, failure: Failure, actor_died: bool = False) -> None:
        """The role gets another process, as long as it makes progress."""
        self._emit(member, f"{member.name} failed: {failure}")
        member.bound.record_progress(member.progress())
        if not self._in_outage(member) and member.bound.ended():
            self._give_up(member, failure)
        elif actor_died:
            member.restart()
        else:
            member.run_again()

    def _in_outage(self, member: ManagedActor) -> bool:
        """Returns whether Redis or the store was away during its process, by its heartbeat or our own count."""
        before, member.outages = member.outages, retries(self._redis).outages
        last = member.last_beat(read_heartbeats(self._redis, self._run_id))
        return member.outages > before or (last is not None and last.outage)

    def _give_up(self, member: ManagedActor, failure: Failure) -> None:
        often = f"it failed {counted(member.bound.ends, 'time')} in a row without progress (rollout.restarts_allowed)"
        self._emit(member, f"{member.name} is given up: {often}")
        if member in self._learners:
            ray.kill(self._trainer.actor, no_restart=True)  # it would continue while the failure is recorded
            self.outcome = RunEnd.failed(replace(failure, detail=f"{failure.detail}; {often}"))
        elif member is self._evaluator:
            ray.kill(member.actor, no_restart=True)
            member.call = None
            if not self._config.stop_at.bounded:
                self._stop(failure, f"the evaluator, which alone could end the run, is given up: {failure.detail}")
        else:
            self._workers.give_up(member)
            if not self._workers.members:
                self._stop(failure, f"{failure.detail} (no rollout worker is left)")

    def _stop(self, failure: Failure, detail: str) -> None:
        end = RunEnd.failed(replace(failure, detail=detail))
        self._flow.set_state(RunState.STOPPING, end.reason, RunState.RUNNING, failure=end.failure)

    # What the heartbeats and the cluster say

    def _read_beats(self) -> Mapping[str, Beat]:
        """Reads the heartbeats each turn, or less often if they are so many that reading is expensive."""
        if world.monotonic() >= self._next_read:
            used = world.thread_time()
            self._beats = {beat.id: beat for beat in read_heartbeats(self._redis, self._run_id)}
            used = world.thread_time() - used
            self._next_read = world.monotonic() + min(used / _READING_SHARE, BEAT_SECONDS)
        return self._beats

    def _replace_if_silent(self, member: ManagedActor, beat: Beat | None) -> None:
        """Ends a process that is there but says nothing, and starts another one."""
        seconds = member.silent_seconds(beat, member.name in self._cluster.unplaced)
        if beat is None or seconds <= self._config.rollout.silent_seconds:
            return
        kill_here(member.actor)
        self._flow.release(member.name)  # another worker may act its claim at once
        silent = f"its process has been silent for {seconds:.0f} s (rollout.silent_seconds) and is replaced"
        self._restart_after_failure(member, Failure(FailureKind.OTHER, f"{member.name}: {silent}"), actor_died=True)

    def _check_placement(self, beats: Mapping[str, Beat]) -> None:
        """Reports capacity and the roles without a place in the coordinator's heartbeat; a trainer without a place
        ends the run."""
        capacity = self._cluster.refresh(self._trainer.actor)
        self._cluster.find_unplaced(self._members(), beats)
        told = {"capacity": asdict(capacity)} if capacity is not None else {}
        self._heartbeat.progress = self._heartbeat.progress | told | {"unplaced": self._cluster.unplaced}
        deadline = self._config.rollout.wait_deadline_seconds
        waits = self._trainer.name in self._cluster.unplaced and self._trainer.name not in beats
        if waits and world.monotonic() - self._trainer.started > deadline:
            asked = ", ".join(f"{name}={amount:g}" for name, amount in needs(trainer_options(self._config)).items())
            there = dict(total_resources())
            text = f"Ray had no place for the trainer ({asked}) within {deadline:g} s; it has {there}"
            self.outcome = RunEnd.failed(Failure(FailureKind.OTHER, text))

    def _report_outages(self, beats: Mapping[str, Beat]) -> None:
        """An event when a role begins to wait for a service that is away, and one when none does any more."""
        away = next((beat for beat in beats.values() if beat.alive and beat.outage), None)
        if (away is None) == (self._waits_for is None):
            return
        text, self._waits_for = f"{self._waits_for} is back; the run continues", None
        if away is not None:
            text = f"the run waits for {away.waiting_for}, which is away ({away.id}: {away.last_error})"
            self._waits_for = away.waiting_for
        emit(self._redis, self._run_id, "outage", text)

    def _follow_flow(self, flow: FlowState, beats: Mapping[str, Beat]) -> None:
        """Follows the run's state: scaling, or the end by another trainer."""
        if self._trainer.call is None and flow.state is RunState.FINISHED:
            self.outcome = RunEnd(flow.reason, flow.failure)
            return
        trainer, silent = beats.get(self._trainer.name), self._config.rollout.silent_seconds
        replaced = self._trainer.call is None and self._trainer.restart_at is None
        if replaced and (trainer is None or trainer.ended or trainer.age_seconds > silent):
            self._trainer.run_again()  # the trainer that took over is gone: ours continues
        if flow.state is RunState.RUNNING:
            names = self._workers.names
            unplaced = [name for name in self._cluster.unplaced if name in names]
            desired = self._scaling.desired(flow, beats, names, unplaced, self._cluster.most_workers)
            self._workers.scale(desired, beats)

    def _emit(self, member: ManagedActor, text: str) -> None:
        emit(self._redis, self._run_id, member.role, text)
