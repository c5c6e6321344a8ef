"""The Ray actor of the trainer and of its other ranks; imports the implementation in the actor's process."""

from typing import Any

import ray

from stagecoach.shared.base.process import at_rest
from stagecoach.shared.runtime.launch import RoleLaunch


class TrainerProcess:
    """A rank in an actor's process; rank 0 is the trainer."""

    def __init__(self, launch: RoleLaunch, rank: int = 0) -> None:
        with at_rest():
            from stagecoach.trainer_node.process import run_rank
        self._run_rank, self._launch, self._rank = run_rank, launch, rank

    @ray.method
    def run(self) -> str:
        """Runs a rank: see `run_rank` in trainer_node/process.py."""
        return self._run_rank(self._launch, self._rank)


TrainerActor: Any = ray.remote(TrainerProcess)
