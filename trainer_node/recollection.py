"""Recollection: what replay memories held, read again from the archive and the log after it.

A checkpoint holds the positions of those fragments, not the fragments: so it costs the same however large a memory is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shared import fragment
from shared.archive import Archive
from shared.checkpoint import Checkpoint
from shared.errors import ArchiveIncomplete
from shared.experience_log import ExperienceLog, LogEntry, before, id_order
from shared.fragment import Fragment
from trainer_node.learner import Learner
from trainer_node.snapshot import Restored, restore


def restore_whole(
    learner: Learner, checkpoint: Checkpoint, archive: Archive, log: ExperienceLog | None = None
) -> Restored:
    """`snapshot.restore`, and what the learner's memories held; `log` has what the archive may not have yet.

    May be called again where the store was away. Raises `CheckpointDamaged`, `ArchiveIncomplete` where some of what
    they held is in neither, and what the store raises.
    """
    restored = restore(learner, checkpoint)
    if learner.remembered:
        learner.recall(_fragments(list(learner.remembered), archive, log))
    return restored


def _fragments(positions: Sequence[str], archive: Archive, log: ExperienceLog | None) -> Iterator[Fragment]:
    wanted = iter(positions)
    position = next(wanted, None)
    for entry in _entries(positions, archive, log):
        if position is None:
            return
        if entry.id == position and entry.fragment is not None:
            yield fragment.decode(entry.fragment)
            position = next(wanted, None)
    if position is not None:
        raise ArchiveIncomplete(
            f"the replay memory held the log's entry {position}, which is neither in the archive nor in Redis any "
            f"more; resume from a newer checkpoint, or train with archive=all"
        )


def _entries(positions: Sequence[str], archive: Archive, log: ExperienceLog | None) -> Iterator[LogEntry]:
    """All that was logged from the first position through the last one."""
    after, last = before(positions[0]), positions[-1]
    segments = archive.segments()
    reach = max([segment.through for segment in segments], key=id_order, default=after)
    reach = min(reach, last, key=id_order)
    if id_order(reach) > id_order(after):
        yield from archive.entries(after, reach)
        after = reach
    if log is not None:
        yield from log.between(after, last)
