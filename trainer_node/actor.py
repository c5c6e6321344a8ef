"""The Ray faces of the trainer and of the ranks beside it: thin classes, nothing else is Ray's."""

from __future__ import annotations

from typing import Any

import ray

from shared.launch import RoleLaunch
from trainer_node.lives import learn_along, train


class TrainerFace:
    """The trainer in an actor's process."""

    def __init__(self, launch: RoleLaunch) -> None:
        self._launch = launch

    @ray.method
    def run(self) -> str:
        """Trains until the run is to end; answers the reason, or `left` where its machine is taken away."""
        return train(self._launch)


class RankFace:
    """A rank beside the trainer, in an actor's process."""

    def __init__(self, launch: RoleLaunch, rank: int) -> None:
        self._launch = launch
        self._rank = rank

    @ray.method
    def run(self) -> str:
        """Learns along until the run has finished, or its machine is taken away; answers which."""
        return learn_along(self._launch, self._rank)


TrainerActor: Any = ray.remote(TrainerFace)
RankActor: Any = ray.remote(RankFace)
