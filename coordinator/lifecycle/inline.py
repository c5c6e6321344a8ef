"""All roles in one process and one thread: for a debugger, and for tests. The same Redis, store and protocol."""

from pathlib import Path

from stagecoach.coordinator.services.restarter import report_outages
from stagecoach.rollout_worker.evaluator import Evaluator, StepResult
from stagecoach.rollout_worker.worker import Worker
from stagecoach.shared.base import world
from stagecoach.shared.base.address import RoleName
from stagecoach.shared.base.failure import EndReason, RoleEnd, RunEnd
from stagecoach.shared.protocol.flow_control import RunState
from stagecoach.shared.runtime.run_context import RunContext, open_run_context
from stagecoach.trainer_node.recovery.incarnation import Incarnation
from stagecoach.trainer_node.trainer import StepResult as Learned
from stagecoach.trainer_node.trainer import Trainer

_ROLES: tuple[RoleName, ...] = ("worker", "trainer", "evaluator")


class InlineRoles:
    def __init__(self, context: RunContext, run_folder: str) -> None:
        self._flow = context.flow  # the coordinator's; each role connects with its own credentials
        self._playing, learning, scoring = (open_run_context(context.config, context.address, name) for name in _ROLES)
        self._incarnation = Incarnation(learning, run_folder)
        self._evaluator = Evaluator(scoring) if context.config.evaluation.enabled else None
        self._workers: dict[int, Worker] = {}
        self._evaluation = context.config.evaluation
        self._turn = 0
        self.clients = [made.redis for made in (self._playing, learning, scoring)]
        report_outages(context, Path(run_folder), *self.clients)

    def run(self, abandon: world.Event) -> RunEnd:
        end = RunEnd("abandoned")
        try:
            trainer = Trainer.start(self._incarnation)
            if self._evaluator is not None:
                self._evaluator.interrupted = lambda: (
                    abandon.is_set() or self._flow.read().state is not RunState.RUNNING
                )
                self._evaluator.start()
            while not abandon.is_set():
                self._scale(self._flow.read().desired_workers)
                self._act()
                if trainer.step(0.0) is Learned.ENDED:
                    flow = self._flow.read()
                    end = RunEnd(flow.reason or EndReason.EXHAUSTED, flow.failure)
                    trainer.save_last(end.reason)
                    self._evaluate_last(end.reason)
                    trainer.finish(end.reason)
                    break
                if self._evaluator is not None:
                    self._evaluator.step(0.0)
        except Exception as error:
            if abandon.is_set():  # perhaps while it waited for Redis or the store
                return RunEnd("abandoned")
            self._incarnation.fail(error)
            raise
        finally:
            for worker in self._workers.values():
                worker.stop(end.reason)
            if self._evaluator is not None:
                self._evaluator.stop(end.reason)
            if abandon.is_set():
                self._incarnation.abandoned()
        return end

    def _evaluate_last(self, reason: str) -> None:
        """Evaluates pending checkpoints; only one if a person stopped the run."""
        if self._evaluator is None:
            return
        until = world.monotonic() + self._evaluation.final_wait_seconds
        while self._evaluator.step(0.0) is StepResult.EVALUATED or self._evaluator.postpones:
            if reason not in (EndReason.SOLVED, EndReason.EXHAUSTED) or world.monotonic() > until:
                break
            world.sleep(0.01)

    def _scale(self, desired: int) -> None:
        for index in range(desired):
            if index not in self._workers:
                self._flow.undrain(f"worker-{index}")
                self._workers[index] = Worker(self._playing, index)
                self._workers[index].start()
        self._flow.drain(*(worker.id for index, worker in self._workers.items() if index >= desired))

    def _act(self) -> None:
        self._turn += 1  # rotates the first worker, so that none starves when credit is short
        for index in sorted(self._workers, key=lambda index: (index - self._turn) % (max(self._workers) + 1)):
            result = self._workers[index].step(0.0)
            if isinstance(result, RoleEnd):
                self._workers.pop(index).stop(result)
