"""All roles in one process and one thread: for a debugger, and for tests. The same Redis, store and protocol."""

import threading
from pathlib import Path

from coordinator.services.restarter import tell_of_outages
from rollout_worker.evaluator import Evaluator
from rollout_worker.evaluator import StepResult as Evaluated
from rollout_worker.worker import Worker
from shared.protocol.redis_client import RoleName
from shared.runtime.failure import RoleEnd, RunEnd
from shared.runtime.run_context import RunContext, open_run_context
from trainer_node.incarnation import Incarnation
from trainer_node.trainer import StepResult, Trainer

_ROLES: tuple[RoleName, ...] = ("worker", "trainer", "evaluator")


class InlineRoles:
    def __init__(self, context: RunContext, run_folder: str) -> None:
        self._flow = context.flow  # the coordinator's; the others connect with the credentials that theirs have
        self._playing, learning, scoring = (open_run_context(context.config, context.address, name) for name in _ROLES)
        self._incarnation = Incarnation(learning, run_folder)
        self._evaluator = Evaluator(scoring)
        self._workers: dict[int, Worker] = {}
        self._turn = 0
        self.clients = [made.redis for made in (self._playing, learning, scoring)]
        tell_of_outages(context, Path(run_folder), *self.clients)

    def run(self, abandon: threading.Event) -> RunEnd:
        end = RunEnd("abandoned")
        try:
            trainer = Trainer.start(self._incarnation)
            self._evaluator.start()
            while not abandon.is_set():
                self._scale(self._flow.read().desired_workers)
                self._act()
                if trainer.step(0.0) is StepResult.ENDED:
                    flow = self._flow.read()
                    end = RunEnd(flow.reason or "exhausted", flow.failure)
                    trainer.save_last(end.reason)
                    while self._evaluator.step(0.0) is Evaluated.EVALUATED:
                        pass  # all that is due: the trainer, which is this thread too, waits for the last one
                    trainer.finish(end.reason)
                    break
                self._evaluator.step(0.0)
        except Exception as error:
            if abandon.is_set():  # perhaps by the Redis or the store that it waited for
                return RunEnd("abandoned")
            self._incarnation.fail(error)
            raise
        finally:
            for worker in self._workers.values():
                worker.stop(end.reason)
            self._evaluator.stop(end.reason)
        return end

    def _scale(self, desired: int) -> None:
        for index in range(desired):
            if index not in self._workers:
                self._flow.undrain(f"worker-{index}")
                self._workers[index] = Worker(self._playing, index)
                self._workers[index].start()
        self._flow.drain(*(worker.id for index, worker in self._workers.items() if index >= desired))

    def _act(self) -> None:
        self._turn += 1  # another one begins each time, so that none starves where credit is short
        for index in sorted(self._workers, key=lambda index: (index - self._turn) % (max(self._workers) + 1)):
            result = self._workers[index].step(0.0)
            if isinstance(result, RoleEnd):
                self._workers.pop(index).stop(result)
