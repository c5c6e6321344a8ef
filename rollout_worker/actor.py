"""The Ray face of the rollout worker and the evaluator: thin classes that own the plain ones.

Ray places them, restarts them when their process dies, and hands over the config; nothing else is Ray's. What they do
is imported in the process that does it, not where they are asked for.
"""

from __future__ import annotations

from typing import Any

import ray

from shared.collector import at_rest
from shared.departure import leaves_on_signal
from shared.launch import RoleLaunch


class WorkerFace:
    """A rollout worker in an actor's process."""

    def __init__(self, launch: RoleLaunch, index: int) -> None:
        with at_rest():
            from rollout_worker.worker import Worker
        self._worker, self._launch, self._index = Worker, launch, index

    @ray.method
    def run(self) -> str:
        """Works until the run ends, the worker is drained or its machine is taken away; answers which."""
        worker = self._worker(self._launch.open(f"worker-{self._index}"), self._index)
        with leaves_on_signal(worker.ask_to_leave):
            return worker.run()


class EvaluatorFace:
    """The evaluator in an actor's process."""

    def __init__(self, launch: RoleLaunch) -> None:
        with at_rest():
            from rollout_worker.evaluator import Evaluator
        self._evaluator, self._launch = Evaluator, launch

    @ray.method
    def run(self) -> str:
        """Evaluates until the run has finished or its machine is taken away; answers which."""
        evaluator = self._evaluator(self._launch.open("evaluator"))
        with leaves_on_signal(evaluator.ask_to_leave):
            return evaluator.run()


WorkerActor: Any = ray.remote(WorkerFace)
EvaluatorActor: Any = ray.remote(EvaluatorFace)
