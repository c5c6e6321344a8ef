"""The archiver: log entries into the archive, before they are trimmed from Redis.

It runs in the publisher's thread, for each checkpoint, between the pointer and the trim: so the log and the archive
together always hold everything since the archive began.
"""

from __future__ import annotations

from shared.archive import Archive, Segment
from shared.config import ArchiveConfig
from shared.errors import StoreError, StoreUnavailable
from shared.experience_log import ExperienceLog, LogEntry, id_order


class Archiver:
    """Appends to one run's archive, and keeps it as long as the config says."""

    def __init__(self, archive: Archive, log: ExperienceLog, config: ArchiveConfig) -> None:
        self._archive = archive
        self._log = log
        self._config = config
        self._segments: list[Segment] | None = None

    def store(self, through: str, trimmed: str, memory_from: str | None = None) -> None:
        """Everything through this position that is not there yet; raises as the store does.

        `trimmed` is the position up to which Redis has the log no more: where the archive was off, it begins there.
        `memory_from` is the oldest position that a replay memory of a checkpoint may be restored from.
        """
        if self._config.keep == "off" and memory_from is None:
            return
        try:
            self._append(through, trimmed)
            if self._config.keep != "all":
                self._forget(memory_from)
        except (StoreError, StoreUnavailable):
            self._segments = None  # what came of it is looked for next time
            raise

    def _append(self, through: str, trimmed: str) -> None:
        if self._segments is None:
            self._segments = [segment for segment in self._archive.segments() if self._whole(segment, trimmed)]
        after = max([trimmed, *(segment.through for segment in self._segments)], key=id_order)
        batch: list[LogEntry] = []
        size = 0
        for entry in self._log.between(after, through):
            if entry.fragment is None and not (
                entry.lost_body or entry.quarantined
            ):  # learnt, and lost since: the archive has a hole there
                if batch:
                    self._write(after, batch[-1].id, batch)
                after, batch, size = entry.id, [], 0
                continue
            batch.append(entry)
            size += len(entry.fragment or b"")
            if size >= self._config.segment_bytes:
                self._write(after, entry.id, batch)
                after, batch, size = entry.id, [], 0
        if batch:
            self._write(after, through, batch)

    def _whole(self, segment: Segment, trimmed: str) -> bool:
        """Whether it may be counted on; what was cut off while it was written goes, since the log has it still."""
        if id_order(segment.through) <= id_order(trimmed) or self._archive.whole(segment):
            return True
        self._archive.delete(segment)
        return False

    def _write(self, after: str, through: str, entries: list[LogEntry]) -> None:
        assert self._segments is not None
        self._segments.append(self._archive.write(after, through, entries))

    def _forget(self, memory_from: str | None) -> None:
        """Segments that are not needed any more; the oldest goes first, or a hole could stay."""
        assert self._segments is not None
        wanted = self._config.memory_env_steps if self._config.keep == "memory" else 0
        kept, steps = len(self._segments), 0
        while kept and (steps < wanted or self._needed(self._segments[kept - 1], memory_from)):
            kept -= 1
            steps += self._segments[kept].env_steps
        for segment in self._segments[:kept]:
            self._archive.delete(segment)
        self._segments = self._segments[kept:]

    def _needed(self, segment: Segment, memory_from: str | None) -> bool:
        return memory_from is not None and id_order(segment.through) >= id_order(memory_from)
