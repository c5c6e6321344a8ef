"""The Ray face of the trainer: a thin class that owns the plain one."""

from __future__ import annotations

from typing import Any

import ray

from shared.departure import leaves_on_signal
from shared.launch import RoleLaunch
from trainer_node.trainer import Trainer


class TrainerFace:
    """The trainer in an actor's process."""

    def __init__(self, launch: RoleLaunch) -> None:
        self._launch = launch

    @ray.method
    def run(self) -> str:
        """Trains until the run is to end; answers the reason, or `left` where its machine is taken away."""
        role = self._launch.open("trainer")
        trainer = Trainer(role, self._launch.run_folder)
        with leaves_on_signal(trainer.ask_to_leave, role.config.trainer.grace_seconds):
            return trainer.run()


TrainerActor: Any = ray.remote(TrainerFace)
