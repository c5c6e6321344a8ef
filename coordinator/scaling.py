"""How many workers there shall be: what a person has ordered, or what `Autoscale` finds between the bounds.

In: the run's flow, the heartbeats, and how many workers there is room for. Out: a number, an event for each decision
that says why, and one where more are wanted but cannot be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.autoscale import Autoscale, Decision
from shared.events import emit
from shared.flow import FlowState
from shared.heartbeat import Beat
from shared.printable import counted
from shared.role import Role
from shared.steps import Phase


class Scaling:
    """`desired` is one look."""

    def __init__(self, role: Role, cores: int | None = None) -> None:
        self._role = role
        self._cores = cores
        """Of the only machine, where Ray's count of CPUs is a number only."""
        rollout = role.config.rollout
        self._autoscale = Autoscale(
            rollout.scaling_window_seconds, rollout.fragments_per_update, rollout.max_policy_lag
        )
        self._told = ""

    def desired(
        self, flow: FlowState, beats: Mapping[str, Beat], workers: Sequence[str], unplaced: Sequence[str], room: int
    ) -> int:
        """What the fleet shall be brought to. `workers` are those it has, the ones that leave included."""
        if flow.scaling != "auto":
            self._autoscale.restart()
            return flow.desired_workers
        most, bound = self._most(flow, room)
        least = min(flow.min_workers, most)
        trainer = beats.get("trainer")
        if not least <= flow.desired_workers <= most:
            self._autoscale.restart()
            return self._order(flow, max(least, min(flow.desired_workers, most)), f"the bounds are {least} and {most}")
        at_work = [beats[name] for name in workers if name in beats and _at_work(beats[name])]
        steady = len(at_work) + len(unplaced) == len(workers) <= flow.desired_workers
        if trainer is None or not _learns(trainer) or not steady or not at_work:
            self._autoscale.restart()
            return flow.desired_workers
        decision = self._autoscale.look(trainer, at_work, least, most)
        return flow.desired_workers if decision is None else self._follow(flow, decision, at_work, unplaced, bound)

    def _most(self, flow: FlowState, room: int) -> tuple[int, str]:
        """The most there may be, and what says so."""
        bounds = [(room, "all that there is room for")]
        if flow.max_workers is not None:
            bounds.append((flow.max_workers, "the bound (rollout.max_workers, or --max)"))
        elif self._cores is not None:
            bounds.append((max(self._cores, flow.desired_workers), "one for each core (--max allows more)"))
        most, text = min(bounds, key=lambda bound: bound[0])
        return max(1, most), text

    def _follow(
        self, flow: FlowState, decision: Decision, at_work: Sequence[Beat], unplaced: Sequence[str], bound: str
    ) -> int:
        """Does what was decided; where that cannot be, says so once."""
        present = len(at_work)
        if unplaced and decision.wanted > present:
            wanted = f"more than {counted(present, 'worker')} {'is' if present == 1 else 'are'} wanted"
            text = f"{wanted} ({decision.why}), but no machine has room for another"
            self._tell(f"no place beside {present}", text)
            return flow.desired_workers
        if decision.wanted > decision.workers == present:
            text = f"{decision.wanted} workers are wanted ({decision.why}), but {present} is {bound}"
            self._tell(f"{present} is {bound}", text)
        if decision.workers == flow.desired_workers:
            return flow.desired_workers
        return self._order(
            flow, decision.workers, decision.why or f"{', '.join(unplaced)} had no place, and are not needed"
        )

    def _order(self, flow: FlowState, workers: int, why: str) -> int:
        """Writes it where `scale` writes, unless a person was faster."""
        if not self._role.flow.set_desired_workers(workers, "auto"):
            return flow.desired_workers
        text = f"scaled {flow.desired_workers} → {workers}: {why}"
        emit(self._role.redis, self._role.run_id, "scaling", text, before=flow.desired_workers, workers=workers)
        self._told = ""
        self._autoscale.restart()
        return workers

    def _tell(self, kind: str, text: str) -> None:
        """An event for what is not done; the same thing once."""
        if kind != self._told:
            emit(self._role.redis, self._role.run_id, "scaling", text)
            self._told = kind


def _at_work(worker: Beat) -> bool:
    """It acts, or would if it had credit; not while it starts or catches up."""
    return worker.alive and bool(worker.progress.get("fragments") or worker.waiting_for == "credit")


def _learns(trainer: Beat) -> bool:
    """It learns from what comes: neither in heat-up, nor in reading again what was learnt before."""
    progress: dict[str, Any] = trainer.progress
    in_training = progress.get("phase") == Phase.TRAIN.value
    return trainer.alive and in_training and not progress.get("reads_again", True)
