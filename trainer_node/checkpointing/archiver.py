"""The archive of a run's log: log and archive together hold everything since the archive began."""

from collections.abc import Callable, Iterator

from stagecoach.shared.config.sections import ArchiveConfig
from stagecoach.shared.experience.log_entry import LogEntry, id_order
from stagecoach.shared.protocol.experience_log import ExperienceLog
from stagecoach.shared.storage.log_archive import Archive, Segment


class Archiver:
    """Archives log entries before they are trimmed, and deletes what the config does not keep."""

    def __init__(self, archive: Archive, log: ExperienceLog, config: ArchiveConfig) -> None:
        self._archive, self._log, self._config = archive, log, config
        self._segments: list[Segment] | None = None
        """Contents of the archive, oldest first; None when the store has to be listed."""

    def store(
        self, through: str, trimmed: str, replay_from: str | None = None, same: Callable[[], bool] = lambda: True
    ) -> None:
        """Archives the log, which begins after `trimmed`, through this position; raises as the store does. Stops when
        it is not the `same` that the trainer reads. Replay buffers may need the entries from `replay_from` on."""
        if self._config.keep == "off" and replay_from is None:
            return
        segments, self._segments = self._segments, None  # after a failed write, list them again
        if segments is None:
            segments = [segment for segment in self._archive.segments() if self._whole(segment, trimmed)]
        after = max([trimmed, *(segment.through for segment in segments)], key=id_order)
        for start, end, entries in self._new(after, through):
            if not same():
                return
            segments.append(self._archive.write(start, end, entries))
        self._segments = segments if self._config.keep == "all" else self._forget(segments, replay_from)

    def _new(self, after: str, through: str) -> Iterator[tuple[str, str, list[LogEntry]]]:
        """Yields the segments to write: the position before, the last position, and the entries."""
        batch, size = list[LogEntry](), 0
        for entry in self._log.between(after, through):
            hole = entry.fragment is None and not (entry.lost_body or entry.quarantined)  # lost since
            if not hole:
                batch.append(entry)
                size += len(entry.fragment or b"")
            if hole or size >= self._config.segment_bytes:
                if batch:
                    yield after, batch[-1].id, batch
                after, batch, size = entry.id, [], 0
        if batch:
            yield after, through, batch

    def _whole(self, segment: Segment, trimmed: str) -> bool:
        """Returns whether a segment is complete; deletes one that was cut off, whose entries the log still has."""
        if id_order(segment.through) <= id_order(trimmed) or self._archive.is_complete(segment):
            return True
        self._archive.delete(segment)
        return False

    def _forget(self, segments: list[Segment], replay_from: str | None) -> list[Segment]:
        """Deletes segments that are no longer needed, oldest first so that no hole stays; returns the others."""
        kept = len(segments)
        needed = [replay_from and id_order(segment.through) >= id_order(replay_from) for segment in segments]
        while kept and needed[kept - 1]:
            kept -= 1
        for segment in segments[:kept]:
            self._archive.delete(segment)
        return segments[kept:]
