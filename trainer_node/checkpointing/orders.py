"""A person's orders from a callback in the trainer's process, through Redis and the store as from anywhere else."""

from stagecoach.shared.runtime.run_context import RunContext
from stagecoach.trainer_node.checkpointing.verification import promote, withdraw


class CallbackOrders:
    """Orders to the run of `role`; each returns once it is recorded."""

    def __init__(self, role: RunContext) -> None:
        self._role = role

    def stop(self) -> None:
        self._role.flow.order_stop()

    def checkpoint(self) -> None:
        self._role.flow.order_checkpoint()

    def promote(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            withdraw(self._role.checkpoints)
        else:
            promote(self._role.checkpoints, checkpoint, live=True)
