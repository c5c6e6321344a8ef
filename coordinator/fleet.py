"""The fleet: Ray actors for the trainer, the evaluator and the rollout workers; placed, watched, replaced, scaled.

Ray restarts an actor whose process dies (it registers as a new incarnation). The fleet restarts a role that raised,
within the configured rate, fills the place of one that left, drains workers that are too many, and knows when the
trainer is done.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import ray.exceptions

from coordinator.capacity import Additions, room
from coordinator.member import Member, cause, fruitful, kill_here
from coordinator.placement import Places, evaluator_options, nodes_of, trainer_options, worker_options
from coordinator.ray_head import RayHead
from coordinator.room import NO_BOUND
from coordinator.scaling import Scaling
from rollout_worker.actor import EvaluatorActor, WorkerActor
from rollout_worker.watchdog import OUTGROWN
from shared.departure import LEFT
from shared.errors import Fenced, StagecoachError
from shared.events import emit
from shared.flow import FlowState
from shared.heartbeat import BEAT_SECONDS, Beat, Heartbeat, forget_heartbeat, read_heartbeats
from shared.launch import RoleLaunch
from shared.rate import Rate
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
_FRUITLESS_LIVES = 3
"""So many lives may end before their first fragment (or score); more of the same will not help."""
_OTHERS_FIRST_SECONDS = 15.0
"""So long the evaluator waits for the others to be there: it has nothing to do before, and they need the cores."""
_FAILED = "failed: "
"""How the last heartbeat of a process begins that its own watchdog has ended."""
_FOR_EVER = {"max_restarts": -1, "max_task_retries": -1}


class RayLost(StagecoachError):
    """Embedded Ray has died, and all actors with it."""


class Fleet:
    """All actors of one run. `tend` is one turn of the coordinator's loop."""

    def __init__(self, role: Role, launch: RoleLaunch, head: RayHead, additions: Additions) -> None:
        self._role = role
        self._head = head
        self._additions = additions
        self._config = role.config
        self._launch = launch
        self._workers: dict[int, Member] = {}
        self._given_up: dict[int, str] = {}
        self._drained: set[str] = set()
        """Workers that are asked to leave, since they are too many."""
        self._unplaced: list[str] = []
        self._scaling = Scaling(role, os.cpu_count() if role.config.ray.address == "embedded" else None)
        # Embedded Ray is this one machine; and who asks its GCS as it dies hangs, and ends with it a minute later
        self._trainer_node: str | None = ray.get_runtime_context().get_node_id() if head.embedded else None
        self._room = NO_BOUND
        self._next_count = 0.0
        self._beats: Mapping[str, Beat] = {}
        self._next_read = 0.0
        self._trainer = self._start("trainer", TrainerActor, trainer_options(role.config), launch)
        self._ranks = [
            self._start(rank_id(rank), RankActor, trainer_options(role.config), launch, rank)
            for rank in range(1, role.config.trainer.ranks)
        ]
        self._evaluator: Member | None = None
        self._begun = time.monotonic()
        self._heartbeat = Heartbeat(role.redis, role.run_id, "coordinator", "coordinator")
        self.outcome: str | None = None
        """Why the trainer has ended."""

    def run(self, abandon: threading.Event) -> str:
        """The coordinator's loop: tends the roles until the trainer has ended; answers why."""
        self._heartbeat.start()
        try:
            while self.outcome is None:
                if abandon.is_set():
                    self.kill()
                    return "abandoned"
                if self._head.lost():
                    raise RayLost("Ray has died")
                self.tend()
            self.close()
            return self.outcome
        finally:
            self._heartbeat.stop(self.outcome or "ended")

    def tend(self) -> None:
        """One turn: who has ended, who must be restarted, how many workers there shall be."""
        for member in self._members():
            if member.due is not None and time.monotonic() >= member.due:
                member.due, member.life = None, member.actor.run.remote()
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
                options = evaluator_options(self._config)
                self._evaluator = self._start("evaluator", EvaluatorActor, options, self._launch)
            for member in self._members():
                self._watch(member, beats.get(member.name))
            self._count_machines()
            self._watch_placement(beats)
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
            self.outcome = flow.reason
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

    def _start(self, name: str, actor: Any, options: dict[str, Any], *arguments: Any) -> Member:
        made = actor.options(**_FOR_EVER, **options).remote(*arguments)
        bounds = self._config.rollout.restarts_allowed, self._config.rollout.restart_window_seconds
        return Member(name, made, made.run.remote(), Rate(*bounds), Rate(*bounds))

    def _scale(self, desired: int, beats: Mapping[str, Beat]) -> None:
        """Starts the workers that are missing, lowest number first; lets those go that are too many."""
        missing = [index for index in range(desired) if index not in self._workers and index not in self._given_up]
        if missing and (self._trainer_node is not None or not self._config.rollout.avoid_trainer_node):
            places = Places(self._config, self._trainer_node)
            for index in missing:
                self._role.flow.undrain(f"worker-{index}")
                options = worker_options(self._config) | places.next()
                self._workers[index] = self._start(f"worker-{index}", WorkerActor, options, self._launch, index)
        self._given_up = {index: error for index, error in self._given_up.items() if index < desired}
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
        try:
            reason, error = ray.get(member.life), None
        except ray.exceptions.TaskCancelledError:  # how Ray tells that a second signal ended it at once
            reason, error = LEFT, None
        except ray.exceptions.RayError as caught:
            if not isinstance(caught, ray.exceptions.RayTaskError) and self._head.lost(notice=True):
                raise RayLost("Ray has died") from caught
            reason, error = "failed", cause(caught)
        if reason in (LEFT, OUTGROWN):
            self._fill_again(member, reason)
        elif member is self._trainer:
            member.life = None
            if error is not None and error.startswith(Fenced.__name__):
                text = "another trainer has taken over; the fleet works on for it"
                emit(self._role.redis, self._role.run_id, "trainer", text)
            else:
                self.outcome = reason if error is None else f"failed: {error}"
        elif error is not None:
            self._restart(member, error)
        elif member is self._evaluator or member in self._ranks:
            member.life = None
        else:
            self._remove(member)

    def _fill_again(self, member: Member, reason: str) -> None:
        """A role that left goes on in a new process, wherever Ray has room: no failure, but not too often."""
        pause = member.departures.pause_seconds()
        member.departures.exceeded()
        later = f" in {pause:.0f} s" if pause else ""
        text = f"{member.name} {reason}; it goes on in a new process{later}"
        emit(self._role.redis, self._role.run_id, "worker", text)
        ray.kill(member.actor, no_restart=False)
        member.life, member.due = None, time.monotonic() + pause
        member.change_process(None)
        member.started = time.monotonic() + pause

    def _restart(self, member: Member, error: str) -> None:
        """A role that raised gets another life, within the rate; beyond it, it is given up."""
        emit(self._role.redis, self._role.run_id, "worker", f"{member.name} failed: {error.splitlines()[0]}")
        beats = {beat.id: beat for beat in read_heartbeats(self._role.redis, self._role.run_id)}
        if (last := beats.get(member.name)) is not None:
            member.fruit = fruitful(last)
        if self._failed_too_often(member, sterile=not member.fruit):
            self._give_up(member, error)
        else:
            member.life = member.actor.run.remote()

    def _failed_too_often(self, member: Member, sterile: bool) -> bool:
        member.fruitless = member.fruitless + 1 if sterile else 0
        member.fruit = False
        return member.failures.exceeded() or member.fruitless > _FRUITLESS_LIVES

    def _give_up(self, member: Member, error: str) -> None:
        emit(self._role.redis, self._role.run_id, "worker", f"{member.name} is given up: it failed too often")
        if member is self._trainer or member in self._ranks:
            ray.kill(self._trainer.actor, no_restart=True)  # or it would go on while the failure is recorded
            name = "the trainer" if member is self._trainer else member.name
            self.outcome = f"failed: {name}: {error}"
            return
        if member is self._evaluator:
            ray.kill(member.actor, no_restart=True)
            member.life = None
            if not self._config.stop_at.bounded:
                reason = f"failed: the evaluator, which alone could end the run, is given up: {error}"
                self._role.flow.set_state("stopping", reason, "running")
            return
        index = self._remove(member)
        self._given_up[index] = error
        if not self._workers:
            self._role.flow.set_state(
                "stopping", f"failed: {error.splitlines()[0]} (no rollout worker is left)", "running"
            )

    def _remove(self, member: Member) -> int:
        index = next(number for number, worker in self._workers.items() if worker is member)
        del self._workers[index]
        self._drained.discard(member.name)
        ray.kill(member.actor, no_restart=True)
        self._role.flow.release(member.name)
        forget_heartbeat(self._role.redis, self._role.run_id, "worker", member.name)
        return index

    def _watch(self, member: Member, beat: Beat | None) -> None:
        """Counts deaths, which Ray makes good without end, and ends a process that is there but says nothing."""
        if beat is None or member.life is None:
            return
        if beat.process not in member.former:
            if beat.ended:
                member.last_words, member.silent_looks = beat.ended, 0
                return
            if member.process not in (None, beat.process):
                words = member.last_words.removeprefix(_FAILED) if member.last_words.startswith(_FAILED) else ""
                if self._failed_too_often(member, sterile=bool(words) and not member.fruit):
                    self._give_up(member, words or "its process dies again and again; see its log")
                    return
            if (beat.process, beat.stamp) != (member.process, member.stamp):
                member.silent_looks = 0
            member.change_process(beat.process)
            member.stamp, member.last_words = beat.stamp, ""
            member.fruit = member.fruit or fruitful(beat)
        if member.name in self._unplaced:
            member.silent_looks = 0  # Ray is starting it: it cannot say anything yet
        member.silent_looks += 1  # looks, not seconds: whatever keeps us from looking keeps the others from beating
        if member.silent_looks * _LOOK_SECONDS > self._config.rollout.silent_seconds:
            self._replace_silent(member, beat)

    def _replace_silent(self, member: Member, beat: Beat) -> None:
        seconds = member.silent_looks * _LOOK_SECONDS
        member.silent_looks = 0
        text = f"{member.name} has been silent for {seconds:.0f} s; its process is replaced"
        emit(self._role.redis, self._role.run_id, "worker", text)
        if beat.process in member.former or not kill_here(beat):
            ray.kill(member.actor, no_restart=False)
        self._role.flow.release(member.name)  # another worker may act its claim at once

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
            self.outcome = (
                f"failed: Ray had no place for the trainer ({needs}) within {deadline:g} s; it has "
                f"{ray.cluster_resources()}"  # type: ignore[no-untyped-call]
            )
