"""The archiver: log entries into the archive, before they are trimmed from Redis.

It runs in the publisher's thread, for each checkpoint, between the pointer and the trim: so the log and the archive
together always hold everything since the archive began.
"""

from __future__ import annotations

from shared.archive import Archive, Segment
from shared.config import ArchiveConfig
from shared.experience_log import ExperienceLog, LogEntry, id_order


class Archiver:
    """Appends to one run's archive, and keeps it as long as the config says."""

    def __init__(self, archive: Archive, log: ExperienceLog, config: ArchiveConfig) -> None:
        self._archive = archive
        self._log = log
        self._config = config
        self._segments: list[Segment] | None = None

    def store(self, through: str, trimmed: str) -> None:
        """Everything through this position that is not there yet; raises as the store does.

        `trimmed` is the position up to which Redis has the log no more: where the archive was off, it begins there.
        """
        if self._config.keep == "off":
            return
        if self._segments is None:
            self._segments = self._archive.segments()
        after = max([trimmed, *(segment.through for segment in self._segments)], key=id_order)
        batch: list[LogEntry] = []
        size = 0
        for entry in self._log.between(after, through):
            batch.append(entry)
            size += len(entry.fragment)
            if size >= self._config.segment_bytes:
                self._write(after, entry.id, batch)
                after, batch, size = entry.id, [], 0
        if batch:
            self._write(after, through, batch)
        if self._config.keep == "memory":
            self._forget()

    def _write(self, after: str, through: str, entries: list[LogEntry]) -> None:
        assert self._segments is not None
        self._segments.append(self._archive.write(after, through, entries))

    def _forget(self) -> None:
        """Segments that lie wholly behind the newest `memory_env_steps`."""
        assert self._segments is not None
        kept, steps = [], 0
        for segment in reversed(self._segments):
            if steps >= self._config.memory_env_steps:
                self._archive.delete(segment)
            else:
                kept.append(segment)
            steps += segment.env_steps
        self._segments = kept[::-1]
