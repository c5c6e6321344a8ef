"""The archive on every kind of store: what goes in comes out, in order, once; holes and damage are named."""

from __future__ import annotations

import pytest

from shared.archive import Archive, Segment, decode_segment, encode_segment
from shared.errors import ArchiveIncomplete
from shared.experience_log import LogEntry
from shared.object_store import ObjectStore


def entry(number: int, size: int = 3) -> LogEntry:
    """Entry `number`-0 with a body of its own."""
    return LogEntry(f"{number}-0", "worker-0", 0, number, 4, bytes([number % 256]) * size, True)


def filled(store: ObjectStore, *bounds: tuple[int, int]) -> Archive:
    """An archive with a segment for each (after, through)."""
    archive = Archive(store, "a-run")
    for after, through in bounds:
        entries = [entry(number) for number in range(after + 1, through + 1)]
        archive.write(f"{after}-0", f"{through}-0", entries)
    return archive


def numbers(entries: list[LogEntry]) -> list[int]:
    """Which entries these are."""
    return [int(item.id.partition("-")[0]) for item in entries]


def test_entries_come_back_byte_for_byte_in_the_order_of_the_log(any_store: ObjectStore) -> None:
    archive = filled(any_store, (0, 9), (9, 10), (10, 120))
    found = list(archive.entries())
    assert found == [entry(number) for number in range(1, 121)]
    assert [(s.after, s.through, s.env_steps) for s in archive.segments()] == [
        ("0-0", "9-0", 36), ("9-0", "10-0", 4), ("10-0", "120-0", 440)
    ]  # fmt: skip
    assert numbers(list(archive.entries("4-0", "10-0"))) == [5, 6, 7, 8, 9, 10]


def test_what_two_trainers_wrote_twice_is_read_once(any_store: ObjectStore) -> None:
    archive = filled(any_store, (0, 5), (0, 8), (3, 8), (8, 9))
    assert numbers(list(archive.entries())) == list(range(1, 10))


def test_a_trainer_reads_it_page_by_page_from_any_position(any_store: ObjectStore) -> None:
    archive, position, found = filled(any_store, (0, 5), (5, 9)), "2-0", []
    while page := archive.read(position, 2, 0.0):
        assert len(page) <= 2
        found += page
        position = page[-1].id
    assert numbers(found) == [3, 4, 5, 6, 7, 8, 9]
    assert numbers(archive.read("1-0", 3, 0.0)) == [2, 3, 4], "going back is reading from there"


def test_holes_and_a_missing_begin_or_end_are_named(any_store: ObjectStore) -> None:
    archive = filled(any_store, (2, 5), (7, 9))
    with pytest.raises(ArchiveIncomplete, match="lacks the log after 5-0 through 7-0"):
        list(archive.entries())
    with pytest.raises(ArchiveIncomplete, match="after 0-0 through 2-0"):
        archive.read("0-0", 1, 0.0)
    with pytest.raises(ArchiveIncomplete, match="after 9-0 through 12-0"):
        list(archive.entries("7-0", "12-0"))
    assert numbers(list(archive.entries("2-0", "5-0"))) == [3, 4, 5]
    assert list(Archive(any_store, "another").segments()) == archive.segments(), "the store is one run's"


def test_an_altered_or_foreign_segment_is_refused() -> None:
    segment = Segment("0-0", "2-0", 8)
    blob = encode_segment("a-run", segment, [entry(1), entry(2)])
    assert decode_segment(blob, "a-run", segment) == [entry(1), entry(2)]
    altered = bytearray(blob)
    altered[-1] ^= 1
    for data, run_id, wanted in (
        (bytes(altered), "a-run", segment),
        (b"", "a-run", segment),
        (blob, "another", segment),
        (blob, "a-run", Segment("0-0", "3-0", 8)),
    ):
        with pytest.raises(ArchiveIncomplete, match=r"experience/0-0_\d-0_8\.safetensors.*cannot be read"):
            decode_segment(data, run_id, wanted)


def test_an_empty_archive_has_nothing(any_store: ObjectStore) -> None:
    archive = Archive(any_store, "a-run")
    assert archive.segments() == [] and list(archive.entries()) == [] and archive.read("0-0", 5, 0.0) == []
