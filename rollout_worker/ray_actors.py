"""Ray actors for the rollout worker and the evaluator: thin classes that own the plain objects."""

from collections.abc import Callable
from typing import Any

import ray

from stagecoach.shared.base.process import at_rest, shield_from_terminal
from stagecoach.shared.runtime.launch import RoleLaunch, shutdown_on_signal
from stagecoach.shared.runtime.run_context import RunContext


def _opened(launch: RoleLaunch, name: str) -> RunContext:
    from stagecoach.rollout_worker.environments.objects import unpack

    context = launch.open(name)  # extends the imports, which the object may need
    unpack(context.config.environment, launch.environment)
    return context


class RayWorker:
    """Rollout worker in an actor's process."""

    def __init__(self, launch: RoleLaunch, index: int) -> None:
        with at_rest():
            from stagecoach.rollout_worker.worker import Worker
        self._open: Callable[[], Any] = lambda: Worker(_opened(launch, f"worker-{index}"), index)

    @ray.method
    def run(self) -> str:
        """Blocks until the run ends, the worker is drained or its machine is preempted; returns the reason."""
        shield_from_terminal()
        player = self._open()
        with shutdown_on_signal(player.request_shutdown):
            return str(player.run())


class RayEvaluator(RayWorker):
    """Evaluator in an actor's process."""

    def __init__(self, launch: RoleLaunch) -> None:
        with at_rest():
            from stagecoach.rollout_worker.evaluator import Evaluator
        self._open = lambda: Evaluator(_opened(launch, "evaluator"))


WorkerActor: Any = ray.remote(RayWorker)
EvaluatorActor: Any = ray.remote(RayEvaluator)
