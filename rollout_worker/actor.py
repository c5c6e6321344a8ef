"""The Ray face of the rollout worker and the evaluator: thin classes that own the plain ones.

Ray places them, restarts them when their process dies, and hands over the config; nothing else is Ray's.
"""

from __future__ import annotations

from typing import Any

import ray

from rollout_worker.evaluator import Evaluator
from rollout_worker.worker import Worker
from shared.departure import leaves_on_signal
from shared.launch import RoleLaunch


class WorkerFace:
    """A rollout worker in an actor's process."""

    def __init__(self, launch: RoleLaunch, index: int) -> None:
        self._launch = launch
        self._index = index

    @ray.method
    def run(self) -> str:
        """Works until the run ends, the worker is drained or its machine is taken away; answers which."""
        worker = Worker(self._launch.open(f"worker-{self._index}"), self._index)
        with leaves_on_signal(worker.ask_to_leave):
            return worker.run()


class EvaluatorFace:
    """The evaluator in an actor's process."""

    def __init__(self, launch: RoleLaunch) -> None:
        self._launch = launch

    @ray.method
    def run(self) -> str:
        """Evaluates until the run has finished or its machine is taken away; answers which."""
        evaluator = Evaluator(self._launch.open("evaluator"))
        with leaves_on_signal(evaluator.ask_to_leave):
            return evaluator.run()


WorkerActor: Any = ray.remote(WorkerFace)
EvaluatorActor: Any = ray.remote(EvaluatorFace)
