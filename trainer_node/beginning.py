"""Where a trainer begins: what the store has of its run."""

from __future__ import annotations

import logging

from shared.checkpoint import Checkpoint
from shared.errors import CheckpointDamaged, CheckpointNotFound
from shared.events import emit
from shared.role import Role
from trainer_node.snapshot import other_versions

_LOGGER = logging.getLogger("stagecoach.trainer")


def newest_checkpoint(role: Role) -> Checkpoint | None:
    """The newest good one, with an event for each that is passed over; None before the first."""
    try:
        checkpoint, problems = role.checkpoints.newest_good()
    except CheckpointNotFound:
        return None
    for problem in problems:
        emit(role.redis, role.run_id, "trainer", f"{problem}; going back to {checkpoint.manifest.name}")
    tell_other_versions(role, checkpoint)
    return checkpoint


def tell_other_versions(role: Role, checkpoint: Checkpoint) -> None:
    """In log and events, where the run continues from a checkpoint of other code or libraries than those here."""
    if said := other_versions(checkpoint.manifest):
        _LOGGER.warning("%s", said)
        emit(role.redis, role.run_id, "trainer", said)


def last_epoch(role: Role) -> int:
    """Of whoever wrote the pointer in the store: a Redis that was set back may have forgotten it."""
    try:
        pointer = role.checkpoints.pointer()
    except CheckpointDamaged:
        return 0  # the publisher makes it anew
    return pointer.epoch if pointer else 0
