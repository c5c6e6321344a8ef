"""The processes that play: a rollout worker and the evaluator, as a run starts them."""

from stagecoach.rollout_worker.environments.objects import unpack
from stagecoach.rollout_worker.evaluator import Evaluator
from stagecoach.rollout_worker.worker import Worker
from stagecoach.shared.runtime.launch import RoleLaunch, shutdown_on_signal


def run(given: bytes, name: str) -> str:
    """Plays as `worker-3` or `evaluator`, by an encoded `RoleLaunch`, until the run ends, the worker is drained or its
    machine is preempted; returns the reason."""
    launch = RoleLaunch.decoded(given)
    context = launch.open(name)  # extends the imports, which an environment given as an object may need
    unpack(context.config.environment, launch.environment)
    kind, _, index = name.partition("-")
    player = Worker(context, int(index)) if kind == "worker" else Evaluator(context)
    with shutdown_on_signal(player.request_shutdown):
        return str(player.run())
