"""A real trainer whose checkpoints are timed."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass

from stagecoach.shared.base.failure import EndReason
from stagecoach.shared.base.process import keep_freed_memory
from stagecoach.shared.protocol.flow_control import RunState
from stagecoach.shared.protocol.policy_board import Published
from stagecoach.shared.runtime.launch import RoleLaunch
from stagecoach.trainer_node.recovery.incarnation import Incarnation
from stagecoach.trainer_node.recovery.recovery import Recovery
from stagecoach.trainer_node.trainer import Trainer

_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Updates:
    """What some updates took."""

    updates: int
    seconds: float
    stalls: list[float]
    """Seconds of each checkpoint in the trainer's main thread."""
    worked: list[float]
    """Of these, the seconds that the thread had the processor: what a busy machine or the other threads do not add to.
    """


class TimedTrainer(Trainer):
    """The product's trainer; its checkpoints can be left out, and are timed."""

    def __init__(self, recovery: Recovery, orders: int) -> None:
        super().__init__(recovery, orders)
        self.stalls: list[float] = []
        self.worked: list[float] = []
        self.checkpoints = True

    def _checkpoint_if_due(self, published: Published) -> None:
        if not self.checkpoints:
            return
        before, began, worked = self.state.parent.version, time.perf_counter(), time.thread_time()
        super()._checkpoint_if_due(published)
        if self.state.parent.version != before:
            self.stalls.append(time.perf_counter() - began)
            self.worked.append(time.thread_time() - worked)


class TrainerStation:
    """A trainer's process."""

    def __init__(self) -> None:
        keep_freed_memory()  # as trainer_node/process.py does
        self._trainer: TimedTrainer | None = None

    def start(self, launch: RoleLaunch, checkpoints: bool, beginning: int) -> int:
        """Takes over a run, and learns so many updates that do not count; answers the parameters."""
        self._role = launch.open("trainer")
        self._trainer = TimedTrainer.start(Incarnation(self._role))
        self._trainer.checkpoints = checkpoints
        while self._trainer.learner.counters.train.updates < beginning:
            self._trainer.step(_POLL_SECONDS)
        policies = self._trainer.learner.policies.values()
        return sum(tensor.numel() for policy in policies for tensor in policy.parameters())

    def learn(self, updates: int) -> Updates:
        """So many more."""
        trainer = self._trainer
        assert trainer is not None
        trainer.stalls, trainer.worked, first, began = [], [], trainer.version, time.perf_counter()
        while trainer.version < first + updates:
            trainer.step(_POLL_SECONDS)
        return Updates(updates, time.perf_counter() - began, trainer.stalls, trainer.worked)

    def peak_bytes(self) -> int:
        """The most memory that this process has had."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def end(self) -> None:
        """Leaves the run as it is: nothing waits for the store."""
        trainer = self._trainer
        assert trainer is not None
        self._role.flow.set_state(RunState.FINISHED, EndReason.EXHAUSTED)
        trainer.state.writer.close(wait_seconds=0.0)
        trainer.incarnation.heartbeat.stop("end of the benchmark")
        self._trainer = None
