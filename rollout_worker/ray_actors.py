"""The rollout worker and the evaluator as Ray actors: thin classes that own the plain ones."""

from collections.abc import Callable
from typing import Any

import ray

from stagecoach.shared.base.process import at_rest, shield_from_terminal
from stagecoach.shared.runtime.launch import RoleLaunch, shutdown_on_signal


class WorkerFace:
    """A rollout worker in an actor's process."""

    def __init__(self, launch: RoleLaunch, index: int) -> None:
        with at_rest():
            from stagecoach.rollout_worker.worker import Worker
        self._open: Callable[[], Any] = lambda: Worker(launch.open(f"worker-{index}"), index)

    @ray.method
    def run(self) -> str:
        """Runs until the run ends, the worker is drained or its machine is taken away; returns which."""
        shield_from_terminal()
        player = self._open()
        with shutdown_on_signal(player.request_shutdown):
            return str(player.run())


class EvaluatorFace(WorkerFace):
    """The evaluator in an actor's process."""

    def __init__(self, launch: RoleLaunch) -> None:
        with at_rest():
            from stagecoach.rollout_worker.evaluator import Evaluator
        self._open = lambda: Evaluator(launch.open("evaluator"))


WorkerActor: Any = ray.remote(WorkerFace)
EvaluatorActor: Any = ray.remote(EvaluatorFace)
