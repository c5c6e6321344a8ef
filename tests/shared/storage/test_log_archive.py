"""The archive on every kind of store: what goes in comes out, in order, once; holes and damage are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagecoach.coordinator.services.embedded import BUCKET
from stagecoach.shared.base.errors import ArchiveIncomplete, StoreUnavailable, UserError
from stagecoach.shared.experience.log_entry import LogEntry
from stagecoach.shared.storage.log_archive import Archive, Segment, decode_segment, encode_segment, read_experience
from stagecoach.shared.storage.object_store import FileStore, ObjectStore, open_folder


def entry(number: int, size: int = 3) -> LogEntry:
    """Entry `number`-0 with a body of its own."""
    return LogEntry(f"{number}-0", "worker-0", 0, number, 4, bytes([number % 256]) * size, True)


def filled(store: ObjectStore, *bounds: tuple[int, int], run_id: str = "a-run") -> Archive:
    """An archive with a segment for each (after, through); its entries are no fragments."""
    archive = Archive(store, run_id)
    for after, through in bounds:
        entries = [entry(number) for number in range(after + 1, through + 1)]
        archive.write(f"{after}-0", f"{through}-0", entries)
    return archive


def numbers(entries: list[LogEntry]) -> list[int]:
    """Which entries these are."""
    return [int(item.id.partition("-")[0]) for item in entries]


def test_entries_come_back_byte_for_byte_in_the_order_of_the_log(any_store: ObjectStore) -> None:
    archive = filled(any_store)
    assert archive.segments() == [] and list(archive.entries()) == [] and archive.read("0-0", 5, 0.0) == []
    filled(any_store, (0, 9), (9, 10), (10, 120))
    found = list(archive.entries())
    assert found == [entry(number) for number in range(1, 121)]
    assert [(s.after, s.through, s.env_steps) for s in archive.segments()] == [
        ("0-0", "9-0", 36), ("9-0", "10-0", 4), ("10-0", "120-0", 440)
    ]  # fmt: skip
    assert numbers(list(archive.entries("4-0", "10-0"))) == [5, 6, 7, 8, 9, 10]


def test_overlapping_segments_are_read_once(any_store: ObjectStore) -> None:
    archive = filled(any_store, (0, 5), (0, 8), (3, 8), (8, 9))
    assert numbers(list(archive.entries())) == list(range(1, 10))


def test_archive_reads_in_pages_from_any_position(any_store: ObjectStore) -> None:
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


def test_altered_or_foreign_segment_is_refused() -> None:
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
        with pytest.raises(ArchiveIncomplete, match=r"experience/0-0_\d-0_8/log\.safetensors.*cannot be read"):
            decode_segment(data, run_id, wanted)


def test_deleted_segment_is_unlisted_and_missing_one_is_named(any_store: ObjectStore) -> None:
    archive = filled(any_store, (0, 2), (2, 4), (4, 6))
    first, second, third = archive.segments()
    archive.delete(first)
    assert archive.segments() == [second, third] and archive.is_complete(second)
    any_store.put(third.key, any_store.get(third.key)[:99])
    assert not archive.is_complete(third) and not archive.is_complete(first)
    reading = archive.entries()
    archive.delete(second)
    with pytest.raises(ArchiveIncomplete, match="run a-run"):
        list(reading)


def test_read_experience_takes_every_way_to_name_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    filled(FileStore(tmp_path, "a-run"), (0, 1))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "a-run"
    for location in ("a-run", "./a-run/", folder, f"file://{folder}", f"../{tmp_path.name}/a-run"):
        caplog.clear()
        assert list(read_experience(location)) == []
        assert "entry 1-0 of worker-0 is not a fragment" in caplog.text
    monkeypatch.chdir(tmp_path / "a-run")
    assert list(read_experience(".")) == []


def test_read_experience_uses_credentials_from_environment(
    s3_servers: dict[str, tuple[str, str, str]], unique_run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, access, secret = s3_servers["rclone"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", access)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    location = f"s3://{BUCKET}/data/{unique_run_id}"
    with pytest.raises(ArchiveIncomplete, match=f"{location} has no archived experience: expected a run's folder"):
        read_experience(location, endpoint)
    filled(open_folder(location, endpoint)[0], (0, 1), run_id=unique_run_id)
    assert list(read_experience(location, endpoint)) == []
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    assert list(read_experience(location + "/")) == []
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StoreUnavailable, match="refuses the credentials"):
        read_experience(location, endpoint)


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("nowhere", "nowhere has no archived experience: expected a run's folder in the store"),
        ("/no/such/folder", "the store folder /no/such is not there"),
        ("file:///no/such/folder", "the store folder /no/such is not there"),
        ("s3://only-a-bucket", "expected a run's folder"),
        ("https://host/bucket/run", "expected a run's folder"),
        ("", "has no archived experience"),
    ],
)
def test_wrong_location_raises_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, location: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=said):
        read_experience(location)


def test_segment_that_is_deleted_while_it_is_read_is_a_hole(any_store: ObjectStore) -> None:
    """The writer of an older trainer may delete what another one has just listed."""
    archive = filled(any_store, (0, 2), (2, 4), (4, 6))
    first, _, third = archive.segments()
    reading = archive.entries("0-0", "6-0", holes=True)
    assert next(reading) == entry(1)
    archive.delete(third)
    assert numbers(list(reading)) == [2, 3, 4]
    archive.delete(first)
    assert numbers(list(archive.entries("0-0", "6-0", holes=True))) == [3, 4]
