"""The fleet: Ray actors for the trainer, the evaluator and the rollout workers; placed, watched, replaced, scaled.

The fleet gives a role that raised or whose process died another one, as long as they make progress (a worker's
registers as a new incarnation), fills the place of one that left, drains workers that are too many, and knows when the
trainer is done.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import ray
import ray.exceptions

from coordinator.capacity import Additions, room
from coordinator.member import Member, cause, kill_here
from coordinator.placement import Places, evaluator_options, nodes_of, trainer_options, worker_options
from coordinator.ray_head import RayHead
from coordinator.ray_logs import how_it_died
from coordinator.room import NO_BOUND
from coordinator.scaling import Scaling
from rollout_worker.actor import EvaluatorActor, WorkerActor
from rollout_worker.watchdog import OUTGROWN
from shared.connection import retries
from shared.departure import LEFT
from shared.errors import Fenced, StagecoachError
from shared.events import emit
from shared.failure import Failure, FailureKind, RunEnd
from shared.flow import FlowState
from shared.heartbeat import BEAT_SECONDS, Beat, Heartbeat, forget_heartbeat, read_heartbeats
from shared.launch import RoleLaunch
from shared.printable import counted
from shared.restarts import Progress, RestartBound, acting_progress, evaluation_progress, learning_progress
from shared.role import Role
from trainer_node.actor import RankActor, TrainerActor
from trainer_node.rendezvous import rank_id

_LOOK_SECONDS = 0.2
_PLACED_SECONDS = 20.0
"""A role that has not said anything for this long after its start probably waits for Ray to place it."""
_READING_SHARE = 0.1
"""Of the processor, that reading heartbeats may take; ten thousand of them take a tenth of a second."""
_CLUSTER_SECONDS = 2.0
"""How often machines are counted."""
_OTHERS_FIRST_SECONDS = 15.0
"""So long the evaluator waits for the others to be there: it has nothing to do before, and they need the cores."""
_LOGGER = logging.getLogger("stagecoach.coordinator")


class RayLost(StagecoachError):
    """Embedded Ray has died or hung, and all actors with it."""


class Fleet:
    """All actors of one run. `tend` is one turn of the coordinator's loop."""

    def __init__(self, role: Role, launch: RoleLaunch, head: RayHead, additions: Additions) -> None:
        self._role = role
        self._head = head
        self._additions = additions
        self._config = role.config
        self._launch = launch
        self._workers: dict[int, Member] = {}
        self._given_up: set[int] = set()
        self._drained: set[str] = set()
        """Workers that are asked to leave, since they are too many."""
        self._unplaced: list[str] = []
        self._scaling = Scaling(role, os.cpu_count() if role.config.ray.address == "embedded" else None)
        # Embedded Ray is this one machine; and who asks its GCS as it dies hangs, and ends with it a minute later
        self._trainer_node: str | None = ray.get_runtime_context().get_node_id() if head.embedded else None
        self._room = NO_BOUND
        self._next_count = 0.0
        self._away: str | None = None
        """What the run waits for, as its roles say."""
        self._beats: Mapping[str, Beat] = {}
        self._next_read = 0.0
        self._read_beats()  # those of a fleet before this one
        learning, options = partial(learning_progress, role.redis, role.run_id), trainer_options(role.config)
        self._trainer = self._start("trainer", learning, options, TrainerActor, launch)
        self._ranks = [
            self._start(rank_id(rank), learning, options, RankActor, launch, rank)
            for rank in range(1, role.config.trainer.ranks)
        ]
        self._evaluator: Member | None = None
        self._begun = time.monotonic()
        self._heartbeat = Heartbeat(role.redis, role.run_id, "coordinator", "coordinator")
        self.outcome: RunEnd | None = None
        """Why the trainer has ended."""

    def run(self, abandon: threading.Event) -> RunEnd:
        """The coordinator's loop: tends the roles until the trainer has ended; returns why."""
        self._heartbeat.start()
        try:
            while self.outcome is None:
                if abandon.is_set():
                    self.kill()
                    return RunEnd("abandoned")
                if self._head.lost():
                    raise RayLost(self._head.fate)
                self.tend()
            self.close()
            return self.outcome
        finally:
            self._heartbeat.stop(self.outcome.reason if self.outcome else "ended")

    def tend(self) -> None:
        """One turn: who has ended, who must be restarted, how many workers there shall be."""
        for member in self._members():
            if member.due is not None and time.monotonic() >= member.due:
                self._begin(member)
        members = {member.life: member for member in self._members() if member.life is not None}
        if members:
            ended, _ = ray.wait(list(members), num_returns=1, timeout=_LOOK_SECONDS)
            for life in ended:
                self._ended(members[life])
        else:
            time.sleep(_LOOK_SECONDS)
        if self.outcome is None:
            beats = self._read_beats()
            if self._evaluator is None and self._others_are_there(beats):
                scored = partial(evaluation_progress, self._role.redis, self._role.run_id)
                options = evaluator_options(self._config)
                self._evaluator = self._start("evaluator", scored, options, EvaluatorActor, self._launch)
            for member in self._members():
                self._watch(member, beats.get(member.name))
            self._count_machines()
            self._watch_placement(beats)
            self._tell_of_outages(beats)
            self._follow(self._role.flow.read(), beats)

    def _others_are_there(self, beats: Mapping[str, Beat]) -> bool:
        """Trainer, ranks and at least one worker; or they take too long."""
        there = self._trainer.name in beats and any(member.name in beats for member in self._workers.values())
        there = there and all(rank.name in beats for rank in self._ranks)
        return there or time.monotonic() - self._begun > _OTHERS_FIRST_SECONDS

    def _read_beats(self) -> Mapping[str, Beat]:
        """At each turn, or where they are so many that this would cost much, about as often as they come."""
        if time.monotonic() >= self._next_read:
            used = time.thread_time()
            self._beats = {beat.id: beat for beat in read_heartbeats(self._role.redis, self._role.run_id)}
            used = time.thread_time() - used
            self._next_read = time.monotonic() + min(used / _READING_SHARE, BEAT_SECONDS)
        return self._beats

    def _follow(self, flow: FlowState, beats: Mapping[str, Beat]) -> None:
        """What the run's state asks for: scaling, or the end that another trainer has brought about."""
        if self._trainer.life is None and flow.state == "finished":
            self.outcome = RunEnd(flow.reason, flow.failure)
            return
        trainer, silent = beats.get(self._trainer.name), self._config.rollout.silent_seconds
        away = self._trainer.life is None and self._trainer.due is None
        if away and (trainer is None or trainer.ended or trainer.age_seconds > silent):
            self._trainer.life = self._trainer.actor.run.remote()  # whoever took over is gone: our own goes on
        if flow.state == "running":
            names = [member.name for member in self._workers.values()]
            unplaced = [name for name in self._unplaced if name in names]
            self._scale(self._scaling.desired(flow, beats, names, unplaced, self._room), beats)

    def close(self, seconds: float = 20.0) -> None:
        """Waits for workers and evaluator to end on their own, then ends their processes.

        Who has never said anything has no process yet, and perhaps never will.
        """
        lives = [
            member.life
            for member in self._members()
            if member.life is not None and member.stamp and member is not self._trainer
        ]
        if lives:
            ray.wait(lives, num_returns=len(lives), timeout=seconds)
        self.kill()

    def kill(self) -> None:
        """Ends all processes at once."""
        for member in self._members():
            ray.kill(member.actor, no_restart=True)

    def _members(self) -> list[Member]:
        evaluator = [] if self._evaluator is None else [self._evaluator]
        return [self._trainer, *self._ranks, *evaluator, *self._workers.values()]

    def _start(
        self, name: str, progress: Callable[[], Progress], options: dict[str, Any], actor: Any, *arguments: Any
    ) -> Member:
        def make(options: dict[str, Any]) -> Any:
            return actor.options(**options).remote(*arguments)

        member = Member(name, make, RestartBound(self._config.rollout.restarts_allowed), progress)
        member.bound.saw(progress())
        member.outages = self._outages()
        if (last := self._beats.get(name)) is not None:  # of one that was removed under this name
            member.former.add(last.process)
        member.begin(options)
        return member

    def _begin(self, member: Member) -> None:
        """Another process for this role, wherever there is room by now."""
        if member in self._workers.values():
            member.begin(worker_options(self._config) | Places(self._config, self._trainer_node).next())
        else:
            member.begin(
                evaluator_options(self._config) if member is self._evaluator else trainer_options(self._config)
            )

    def _scale(self, desired: int, beats: Mapping[str, Beat]) -> None:
        """Starts the workers that are missing, lowest number first; lets those go that are too many."""
        missing = [index for index in range(desired) if index not in self._workers and index not in self._given_up]
        if missing and (self._trainer_node is not None or not self._config.rollout.avoid_trainer_node):
            places = Places(self._config, self._trainer_node)
            for index in missing:
                name = f"worker-{index}"
                self._role.flow.undrain(name)
                options = worker_options(self._config) | places.next()
                acted = partial(acting_progress, self._role.redis, self._role.run_id, name)
                self._workers[index] = self._start(name, acted, options, WorkerActor, self._launch, index)
        self._given_up = {index for index in self._given_up if index < desired}
        too_many = [member for index, member in self._workers.items() if index >= desired]
        for index, member in self._workers.items():
            if index < desired and member.name in self._drained:  # called back before it has left
                self._role.flow.undrain(member.name)
                self._drained.discard(member.name)
        self._let_go(too_many, beats)

    def _let_go(self, members: Sequence[Member], beats: Mapping[str, Beat]) -> None:
        """Workers finish their fragments and leave; those that have no living process have none to finish."""
        asked = []
        for member in members:
            beat = beats.get(member.name)
            if beat is None or not beat.alive or member.life is None:
                self._remove(member)
            elif member.name not in self._drained:
                asked.append(member.name)
        self._role.flow.drain(*asked)
        self._drained.update(asked)

    def _count_machines(self) -> None:
        """What room there is, and where the trainer stands; workers that it has come to make way, if they shall."""
        if time.monotonic() < self._next_count:
            return
        if self._head.embedded:
            self._next_count = float("inf")
        else:
            self._next_count = time.monotonic() + _CLUSTER_SECONDS
            self._trainer_node = nodes_of({"trainer": self._trainer.actor})["trainer"] or self._trainer_node
        found = room(self._config, self._additions, self._trainer_node)
        self._room = found.most
        self._heartbeat.progress = self._heartbeat.progress | {"room": found.as_dict()}
        if self._config.rollout.avoid_trainer_node:
            self._keep_apart()

    def _keep_apart(self) -> None:
        actors = {member.name: member.actor for member in self._workers.values() if member.stamp}
        for name, node in nodes_of(actors).items():
            if node is not None and node == self._trainer_node:
                self._role.flow.drain(name)  # and its place is filled elsewhere

    def _ended(self, member: Member) -> None:
        died, fenced = False, False
        failure: Failure | None = None
        try:
            reason = ray.get(member.life)
        except ray.exceptions.TaskCancelledError:  # how Ray tells that a second signal ended it at once
            reason = LEFT
        except ray.exceptions.RayTaskError as caught:
            reason, failure, fenced = "failed", Failure.of(cause(caught)), isinstance(cause(caught), Fenced)
            _LOGGER.error("%s failed: %s", member.name, caught)
        except ray.exceptions.RayError as caught:
            if self._head.lost(notice=True):
                raise RayLost(self._head.fate) from caught
            reason, failure, died = "failed", self._death(member, caught), True
        if reason in (LEFT, OUTGROWN):
            self._fill_again(member, reason)
        elif member is self._trainer and not died:
            member.life = None
            if fenced:
                text = "another trainer has taken over; the fleet works on for it"
                emit(self._role.redis, self._role.run_id, "trainer", text)
            else:
                ended = RunEnd(reason, self._role.flow.read().failure)
                self.outcome = ended if failure is None else RunEnd.failed(failure)
        elif failure is not None:
            self._restart(member, failure, died)
        elif member is self._evaluator or member in self._ranks:
            member.life = None
        else:
            self._remove(member)

    def _death(self, member: Member, error: ray.exceptions.RayError) -> Failure:
        """Why its process has died: what its own watchdog said, else how it ended and its last words.

        One that ended itself did what was run in it: in a worker or the evaluator that is the environment.
        """
        beats = read_heartbeats(self._role.redis, self._role.run_id)
        last = next((beat for beat in beats if beat.id == member.name and beat.process not in member.former), None)
        if last is not None and last.failure is not None:
            return Failure(last.failure, last.ended or "failed")
        how, words = how_it_died(error)
        _LOGGER.warning("%s: %s%s", member.name, how, "".join(f"\n  {line}" for line in words.lines))
        of_itself = words.how is not None and (member is self._evaluator or member in self._workers.values())
        said = f"; it said last: {' | '.join(line.strip() for line in words.lines)}" if words.lines else ""
        return Failure(FailureKind.ENVIRONMENT if of_itself else FailureKind.OTHER, f"{member.name}: {how}{said}")

    def _fill_again(self, member: Member, reason: str) -> None:
        """A role that left goes on in a new process, wherever Ray has room: no failure, but not too often."""
        pause = member.pause_seconds()
        later = f" in {pause:.0f} s" if pause else ""
        text = f"{member.name} {reason}; it goes on in a new process{later}"
        emit(self._role.redis, self._role.run_id, "worker", text)
        member.leave(time.monotonic() + pause)

    def _restart(self, member: Member, failure: Failure, died: bool) -> None:
        """A role that raised, or whose process died, gets another life, as long as its lives make progress."""
        emit(self._role.redis, self._role.run_id, "worker", f"{member.name} failed: {failure}")
        member.bound.saw(member.progress())
        if not self._in_outage(member) and member.bound.ended():
            self._give_up(member, failure)
        elif died:
            self._begin(member)
        else:
            member.life = member.actor.run.remote()

    def _in_outage(self, member: Member) -> bool:
        """Whether its life saw a Redis or a store that is away, by its last heartbeat or our own eyes: no failure."""
        seen, member.outages = member.outages, self._outages()
        beats = read_heartbeats(self._role.redis, self._role.run_id)
        last = next((beat for beat in beats if beat.id == member.name and beat.process not in member.former), None)
        return member.outages > seen or (last is not None and last.outage)

    def _outages(self) -> int:
        found = retries(self._role.redis)
        return found.outages if found is not None else 0

    def _give_up(self, member: Member, failure: Failure) -> None:
        often = f"it failed {counted(member.bound.ends, 'time')} in a row without progress (rollout.restarts_allowed)"
        emit(self._role.redis, self._role.run_id, "worker", f"{member.name} is given up: {often}")
        if member is self._trainer or member in self._ranks:
            ray.kill(self._trainer.actor, no_restart=True)  # or it would go on while the failure is recorded
            self.outcome = RunEnd.failed(replace(failure, detail=f"{failure.detail}; {often}"))
            return
        if member is self._evaluator:
            ray.kill(member.actor, no_restart=True)
            member.life = None
            if not self._config.stop_at.bounded:
                self._stop(failure, f"the evaluator, which alone could end the run, is given up: {failure.detail}")
            return
        index = self._remove(member)
        self._given_up.add(index)
        if not self._workers:
            self._stop(failure, f"{failure.detail} (no rollout worker is left)")

    def _stop(self, failure: Failure, detail: str) -> None:
        """The trainer ends the run because of it."""
        end = RunEnd.failed(replace(failure, detail=detail))
        self._role.flow.set_state("stopping", end.reason, "running", failure=end.failure)

    def _remove(self, member: Member) -> int:
        index = next(number for number, worker in self._workers.items() if worker is member)
        del self._workers[index]
        self._drained.discard(member.name)
        ray.kill(member.actor, no_restart=True)
        self._role.flow.release(member.name)
        forget_heartbeat(self._role.redis, self._role.run_id, "worker", member.name)
        return index

    def _watch(self, member: Member, beat: Beat | None) -> None:
        """Ends a process that is there but says nothing."""
        if beat is None or member.life is None:
            return
        if beat.process not in member.former:
            if beat.ended or (beat.process, beat.stamp) != (member.process, member.stamp):
                member.silent_looks = 0
            member.process, member.stamp = beat.process, beat.stamp
            if beat.ended:
                return
        if member.process is None:
            return  # what is there is a former life's; this one is still starting, which may take long
        if member.name in self._unplaced:
            member.silent_looks = 0  # Ray is starting it: it cannot say anything yet
        member.silent_looks += 1  # looks, not seconds: whatever keeps us from looking keeps the others from beating
        if member.silent_looks * _LOOK_SECONDS > self._config.rollout.silent_seconds:
            self._replace_silent(member, beat)

    def _replace_silent(self, member: Member, beat: Beat) -> None:
        seconds = member.silent_looks * _LOOK_SECONDS
        if beat.process not in member.former:
            kill_here(beat)  # one that is stopped does not hear what Ray tells it
        self._role.flow.release(member.name)  # another worker may act its claim at once
        text = (
            f"{member.name}: its process has been silent for {seconds:.0f} s (rollout.silent_seconds) and is replaced"
        )
        self._restart(member, Failure(FailureKind.OTHER, text), died=True)

    def _without_machine(self, beats: Mapping[str, Beat]) -> list[str]:
        """Who has fallen silent since its machine is gone, and has no place on another one yet."""
        if self._head.embedded:
            return []
        last = [(member, beats[member.name]) for member in self._members() if member.name in beats]
        silent = {
            member.name: member.actor
            for member, beat in last
            if not beat.alive and (beat.ended is None or beat.process in member.former)
        }
        return [name for name, node in nodes_of(silent).items() if node is None]

    def _tell_of_outages(self, beats: Mapping[str, Beat]) -> None:
        """An event as a role begins to wait for what is away, and one when none does any more."""
        away = next((beat for beat in beats.values() if beat.alive and beat.outage), None)
        if (away is None) == (self._away is None):
            return
        text = f"{self._away} is back; the run continues"
        if away is not None:
            text = f"the run waits for {away.waiting_for}, which is away ({away.id}: {away.trouble})"
        self._away = away.waiting_for if away is not None else None
        emit(self._role.redis, self._role.run_id, "outage", text)

    def _watch_placement(self, beats: Mapping[str, Beat]) -> None:
        """Who waits for a place is named in the coordinator's heartbeat; a trainer without one ends the run."""
        now = time.monotonic()
        waiting = [
            member for member in self._members() if member.name not in beats and now - member.started > _PLACED_SECONDS
        ]
        self._unplaced = [member.name for member in waiting] + self._without_machine(beats)
        self._heartbeat.progress = self._heartbeat.progress | {"unplaced": self._unplaced}
        deadline = self._config.rollout.wait_deadline_seconds
        if self._trainer in waiting and now - self._trainer.started > deadline:
            needs = ", ".join(f"{name}={value:g}" for name, value in trainer_options(self._config).items())
            there = ray.cluster_resources()  # type: ignore[no-untyped-call]
            text = f"Ray had no place for the trainer ({needs}) within {deadline:g} s; it has {there}"
            self.outcome = RunEnd.failed(Failure(FailureKind.OTHER, text))
