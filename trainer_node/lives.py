"""The life of a process that learns: of the trainer, or of another rank beside it."""

from __future__ import annotations

import signal

from shared.departure import LEFT, leaves_on_signal
from shared.freed_memory import keep_freed_memory
from shared.launch import RoleLaunch
from shared.restarts import RestartBound, learning_progress
from trainer_node.group import GroupBroken
from trainer_node.rank import Rank
from trainer_node.rendezvous import rank_id
from trainer_node.trainer import Trainer

_DEFAULT = (signal.SIGTERM,)


def train(launch: RoleLaunch, numbers: tuple[signal.Signals, ...] = _DEFAULT) -> str:
    """Trains until the run is to end; answers the reason, or `left` where its machine is taken away.

    Where the group of its ranks breaks, the next trainer takes up the run from the newest checkpoint and the log, in
    this same process, as long as that makes progress.
    """
    keep_freed_memory()
    role = launch.open("trainer")
    bound = RestartBound(role.config.rollout.restarts_allowed)
    bound.saw(learning_progress(role.redis, role.run_id))
    trainer = Trainer(role, launch.run_folder)
    with leaves_on_signal(lambda: trainer.ask_to_leave(), role.config.trainer.grace_seconds, numbers):
        while not trainer.leaving:
            try:
                return trainer.run()
            except GroupBroken as error:
                bound.saw(learning_progress(role.redis, role.run_id))
                if bound.ended():
                    trainer.fail(error)
                    raise
                leaving = trainer.leaving
                trainer = Trainer(role, launch.run_folder)
                trainer.leaving |= leaving
    return LEFT


def learn_along(launch: RoleLaunch, rank: int, numbers: tuple[signal.Signals, ...] = _DEFAULT) -> str:
    """Learns beside the trainer until the run has finished; answers that, or `left`."""
    keep_freed_memory()
    role = Rank(launch.open(rank_id(rank)), rank)
    with leaves_on_signal(role.ask_to_leave, numbers=numbers):
        return role.run()
