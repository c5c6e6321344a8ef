"""The Ray faces of the trainer and of the ranks beside it: thin classes, nothing else is Ray's.

What they do is imported in the process that does it, not where they are asked for.
"""

from __future__ import annotations

from typing import Any

import ray

from shared.collector import at_rest
from shared.launch import RoleLaunch


class TrainerFace:
    """The trainer in an actor's process."""

    def __init__(self, launch: RoleLaunch) -> None:
        with at_rest():
            from trainer_node.lives import train
        self._train, self._launch = train, launch

    @ray.method
    def run(self) -> str:
        """Trains until the run is to end; answers the reason, or `left` where its machine is taken away."""
        return self._train(self._launch)


class RankFace:
    """A rank beside the trainer, in an actor's process."""

    def __init__(self, launch: RoleLaunch, rank: int) -> None:
        with at_rest():
            from trainer_node.lives import learn_along
        self._learn_along, self._launch, self._rank = learn_along, launch, rank

    @ray.method
    def run(self) -> str:
        """Learns along until the run has finished, or its machine is taken away; answers which."""
        return self._learn_along(self._launch, self._rank)


TrainerActor: Any = ray.remote(TrainerFace)
RankActor: Any = ray.remote(RankFace)
