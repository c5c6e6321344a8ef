"""The Ray face of the trainer: a thin class that owns the plain one."""

from __future__ import annotations

from typing import Any

import ray

from shared.launch import RoleLaunch
from trainer_node.trainer import Trainer


class TrainerFace:
    """The trainer in an actor's process."""

    def __init__(self, launch: RoleLaunch) -> None:
        self._launch = launch

    @ray.method
    def run(self) -> str:
        """Trains until the run is to end; answers the reason."""
        return Trainer(self._launch.open("trainer"), self._launch.run_folder).run()


TrainerActor: Any = ray.remote(TrainerFace)
