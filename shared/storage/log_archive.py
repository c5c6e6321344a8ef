"""The archive: the experience log's entries in the store, in segments, for as long as the config says.

A segment is one object `experience/<after>_<through>_<env steps>/log.safetensors`: every entry after the first
position, through the second, byte for byte as Redis held it, also those that the trainer dropped.
"""

import itertools
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from stagecoach.shared.base.errors import ArchiveIncomplete, FragmentError, ObjectMissing
from stagecoach.shared.experience import fragment, tensor_blob
from stagecoach.shared.experience.fragment import Fragment
from stagecoach.shared.experience.log_entry import START, LogEntry, id_order
from stagecoach.shared.storage.object_store import ObjectStore, open_folder

EXPERIENCE = "experience/"
FORMAT = 1
_NAME = re.compile(r"(\d+-\d+)_(\d+-\d+)_(\d+)")
_LOGGER = logging.getLogger("stagecoach.archive")


@dataclass(frozen=True)
class Segment:
    """One object of the archive: the entries after one position, through another."""

    after: str
    through: str
    env_steps: int

    @property
    def key(self) -> str:
        return f"{EXPERIENCE}{self.after}_{self.through}_{self.env_steps}/log.safetensors"


def encode_segment(run_id: str, segment: Segment, entries: Iterable[LogEntry]) -> bytes:
    """Returns one blob: the fragments' bytes end to end, and a header row for each. A fragment whose body was lost has
    no size; one in quarantine is marked, so that a replay drops it unread as well."""
    rows, bodies = [], []
    for e in entries:
        size, poison = None if e.fragment is None else len(e.fragment), ["poison"] if e.quarantined else []
        rows.append([e.id, e.worker, e.incarnation, e.seq, e.transitions, e.pushed, size, *poison])
        bodies.append(e.fragment or b"")
    header = {"format": FORMAT, "run_id": run_id, "after": segment.after, "through": segment.through, "entries": rows}
    return tensor_blob.encode({"fragments": np.frombuffer(b"".join(bodies), np.uint8)}, header)


def decode_segment(blob: bytes, run_id: str, segment: Segment) -> list[LogEntry]:
    """Returns the entries, in order; raises `ArchiveIncomplete` for bytes that are not this segment."""
    try:
        arrays, header = tensor_blob.decode(blob)
        if (header["format"], header["run_id"]) != (FORMAT, run_id):
            raise ValueError(f"it is format {header['format']} of run {header['run_id']}")
        if (header["after"], header["through"]) != (segment.after, segment.through):
            raise ValueError(f"it holds {header['after']} to {header['through']}")
        data, place, entries = arrays["fragments"].tobytes(), 0, []
        for id_, worker, incarnation, seq, transitions, claimed, size, *poison in header["entries"]:
            body = None if size is None else data[place : place + size]
            state = {"lost_body": body is None and not poison, "quarantined": poison == ["poison"]}
            entries.append(LogEntry(id_, worker, incarnation, seq, transitions, body, claimed, **state))
            place += size or 0
    except (FragmentError, KeyError, TypeError, ValueError) as error:
        raise ArchiveIncomplete(f"the archive's {segment.key} of run {run_id} cannot be read: {error}") from None
    return entries


class Archive:
    def __init__(self, store: ObjectStore, run_id: str) -> None:
        self._store, self._run_id = store, run_id
        self._reading: Iterator[LogEntry] = iter(())
        self._read_to: str | None = None

    def segments(self) -> list[Segment]:
        """Lists all segments, in the order of the log. Those of two trainers may overlap."""
        matches = [_NAME.fullmatch(name) for name in self._store.folders(EXPERIENCE)]
        found = [Segment(match[1], match[2], int(match[3])) for match in matches if match]
        return sorted(found, key=lambda segment: (id_order(segment.through), id_order(segment.after)))

    def write(self, after: str, through: str, entries: list[LogEntry]) -> Segment:
        """Stores all the entries after one position, through another, as one segment."""
        segment = Segment(after, through, sum(entry.transitions for entry in entries))
        self._store.put(segment.key, encode_segment(self._run_id, segment, entries))
        return segment

    def delete(self, segment: Segment) -> None:
        self._store.delete(segment.key)

    def is_complete(self, segment: Segment) -> bool:
        """Checks that a segment can be read; a store may keep half of an upload that was cut off."""
        try:
            self._decoded(segment)
        except (ArchiveIncomplete, ObjectMissing):
            return False
        return True

    def _decoded(self, segment: Segment) -> list[LogEntry]:
        return decode_segment(self._store.get(segment.key), self._run_id, segment)

    def entries(self, after: str | None = None, through: str | None = None, holes: bool = False) -> Iterator[LogEntry]:
        """Yields the entries after one position (or the archive's first) through another, with one segment in memory;
        raises `ArchiveIncomplete` for a hole or an archive that ends before (except with `holes`). An unreadable
        segment is skipped if others hold the same entries."""
        segments, damaged = self.segments(), dict[str, ArchiveIncomplete]()
        covered = after or (segments[0].after if segments else START)
        for segment in segments:
            if not _later(segment.through, covered):
                continue
            if through is not None and not _later(through, covered):
                return
            if _later(segment.after, covered) and not (holes and covered not in damaged):
                raise damaged.get(covered) or self._hole(covered, segment.after)
            try:
                entries = self._decoded(segment)
            except ObjectMissing as error:
                if not holes:  # else that is one: another trainer has deleted it since it was listed
                    damaged[covered] = ArchiveIncomplete(f"the archive of run {self._run_id}: {error}")
                continue
            except ArchiveIncomplete as error:
                damaged[covered] = error
                continue
            for entry in entries:
                if _later(entry.id, covered) and (through is None or not _later(entry.id, through)):
                    yield entry
            covered = segment.through
        if covered in damaged:
            raise damaged[covered]
        if through is not None and _later(through, covered) and not holes:
            raise self._hole(covered, through)

    def _hole(self, after: str, through: str) -> ArchiveIncomplete:
        return ArchiveIncomplete(
            f"the archive of run {self._run_id} lacks the log after {after} through {through}; a run keeps all of its "
            f"log with archive=all from its start, as long as Redis does not lose it"
        )

    def read(self, after: str, count: int, block_seconds: float) -> list[LogEntry]:
        """Returns up to `count` entries after a position, like `ExperienceLog.read`; never waits."""
        if after != self._read_to:
            self._reading = self.entries(after)
        page = list(itertools.islice(self._reading, count))
        self._read_to = page[-1].id if page else after
        return page


def read_experience(location: str | Path, endpoint_url: str | None = None) -> Iterator[Fragment]:
    """Reads a run's archived experience as a dataset: its fragments, in the log's order, lazily.

    `location` is the run's folder in the store (a path, `file://…`, or `s3://bucket/prefix/run`, credentials by the
    standard AWS chain). Each `Fragment` has a header (worker, sequence number, policy version, episodes that ended
    in it) and, per policy id, columns as described in shared/experience/fragment.py: `obs` [T, S, …], `action`,
    `reward`, `terminated`, `truncated`, `mask`, `log_prob` [T, S] and so on. Entries that are not fragments are
    skipped with a warning. Raises `ArchiveIncomplete` for a missing archive, a hole, or an unreadable segment.
    """
    store, run_id = open_folder(str(location), endpoint_url)
    return experience(Archive(store, run_id), str(location))


def experience(
    archive: Archive, where: str, after: str | None = None, through: str | None = None
) -> Iterator[Fragment]:
    """Yields the fragments in an archive; raises at once for an empty one, which may be the wrong place."""
    if not archive.segments():
        raise ArchiveIncomplete(
            f"{where} has no archived experience: expected a run's folder in the store with {EXPERIENCE} in it, which "
            f"a run with archive=all writes with each checkpoint"
        )

    def fragments() -> Iterator[Fragment]:
        for entry in archive.entries(after, through):
            if entry.fragment is None or entry.quarantined:
                continue  # dropped, and in the ledger as such
            try:
                yield replace(fragment.decode(entry.fragment), position=entry.id)
            except FragmentError as error:
                _LOGGER.warning("entry %s of %s is not a fragment: %s", entry.id, entry.worker, error)

    return fragments()


def _later(a: str, b: str) -> bool:
    return id_order(a) > id_order(b)
