"""Drops: the archived log is only judged again, and what was not learned from is listed."""

from dataclasses import dataclass

from stagecoach.shared.base.errors import ArchiveIncomplete, DropReason
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.experience.log_entry import LogEntry
from stagecoach.shared.storage.checkpoint_store import CheckpointStore, Manifest
from stagecoach.trainer_node.replay.rerun import BEGINNING, check_lineage, next_fragments, open_archive
from stagecoach.trainer_node.state import snapshot
from stagecoach.trainer_node.state.log_consumer import LogConsumer


@dataclass(frozen=True)
class DroppedEntry:
    """A log entry that was not learned from; for `lost`, the entry before which fragments are missing."""

    position: str
    worker: str
    incarnation: int
    seq: int
    version: int
    """Policy version of the trainer that dropped it."""
    reason: DropReason
    fragments: int
    transitions: int
    detail: str


def dropped_entries(checkpoints: CheckpointStore, config: Config, start: str, goal: str) -> list[DroppedEntry]:
    """Lists what was dropped from the log between two checkpoints, by judging the archive as the trainer did.

    Nothing is trained; `start` is as in `rerun`. Raises the same errors, and `ArchiveIncomplete` where the archive is
    not what the ledger of `goal` accounts for.
    """
    aim, found = checkpoints.load(goal, only=snapshot.STATE), list[DroppedEntry]()
    read, description = open_archive(checkpoints, config).read, checkpoints.description()
    version = updates = 0

    def observe(entry: LogEntry, reason: DropReason, fragments: int, detail: str) -> None:
        size, place = fragments * entry.transitions, (entry.id, entry.worker, entry.incarnation, entry.seq)
        found.append(DroppedEntry(*place, version, reason, fragments, size, detail))

    consumer = LogConsumer(checkpoints.run_id, config, description, read, None, observe_drop=observe)
    consumer.commit(0)
    if start != BEGINNING:
        begun = checkpoints.load(start, only=snapshot.STATE)
        version, updates = begun.manifest.version, _updates(begun.manifest)
        consumer.restore(snapshot.read_state(begun).committed)
    check_lineage(start, version, aim.manifest, snapshot.read_state(aim).lineage, config)
    trains_from = aim.manifest.version - (_updates(aim.manifest) - updates)  # all versions before are of the warm-up
    while version < aim.manifest.version:
        next_fragments(consumer, config, version, Phase.TRAIN if version >= trains_from else Phase.HEATUP, aim.manifest)
        version += 1
        consumer.commit(version)
    if consumer.committed.ledger != snapshot.read_state(aim).committed.ledger:
        raise ArchiveIncomplete(f"the archived log, judged again, does not give the ledger of {goal}")
    return found


def _updates(manifest: Manifest) -> int:
    return int(manifest.provenance["counters"][Phase.TRAIN]["updates"])
