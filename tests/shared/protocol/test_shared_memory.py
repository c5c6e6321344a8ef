"""Bodies in shared memory: found again by whoever sees the same folder, used again, and bounded."""

from __future__ import annotations

import os
import resource
import shutil
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from stagecoach.coordinator.services import memory_folder
from stagecoach.coordinator.services.memory_folder import MemoryFolder
from stagecoach.shared.base.errors import ShardUnavailable
from stagecoach.shared.protocol import payload_shards
from stagecoach.shared.protocol.payload_shards import Bodies, bytes_by_shard
from stagecoach.shared.protocol.shared_memory import AT_LEAST, FREE, PLACE, SharedMemory, kept_bodies
from tests.conftest import MakeRole
from tests.support.runs.builders import in_memory, small_tmpfs
from tests.support.runs.small_run import SmallWorker, begin, small_config

SIZE = AT_LEAST


def name(seq: int, incarnation: int = 0) -> str:
    return f"worker-0:{incarnation}:{seq}:{seq:032x}"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[MemoryFolder]:
    found = MemoryFolder(tmp_path)
    yield found
    found.close()


@pytest.fixture
def memory(folder: MemoryFolder, tmp_path: Path) -> SharedMemory:
    return SharedMemory(str(folder.path), kept_bodies(tmp_path))


def test_body_is_private_and_read_by_another_process(folder: MemoryFolder, memory: SharedMemory) -> None:
    assert memory.put(name(0), b"x" * SIZE) and memory.put(name(0), b"x" * SIZE)
    reader = SharedMemory(str(folder.path))
    assert reader.token == memory.token != "" and reader
    assert reader.get(name(0), SIZE) == b"x" * SIZE
    assert reader.get(name(0), SIZE + 1) is None and reader.get(name(1), SIZE) is None
    assert reader.names() == [name(0)]
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder.path, folder.path / name(0))]
    assert modes == [0o700, 0o600]


def test_removed_file_is_used_again_once(folder: MemoryFolder, memory: SharedMemory) -> None:
    assert memory.put(name(0), b"a" * SIZE)
    inode = (folder.path / name(0)).stat().st_ino
    assert memory.remove([name(0), name(9)]) == 1
    assert memory.put(name(1), b"b" * (SIZE - 1)) and memory.put(name(2), b"c" * SIZE)
    assert (folder.path / name(1)).stat().st_ino == inode != (folder.path / name(2)).stat().st_ino
    assert memory.get(name(1), SIZE - 1) == b"b" * (SIZE - 1)
    assert memory.remove([name(1)]) == 1
    assert memory.remove([]) == 0
    assert os.listdir(folder.path / FREE) == [], "a file that nobody used since the last removal is gone"


def test_stopped_writer_spoils_no_other_body(
    folder: MemoryFolder, memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has opened its file and is stopped; meanwhile a successor registers, and the file gets another body."""
    other, real_open = SharedMemory(str(folder.path)), os.open

    def stop_after(path: str, flags: int, *mode: int) -> int:
        file = real_open(path, flags, *mode)
        monkeypatch.setattr(os, "open", real_open)
        assert other.remove([name(0)]) == 1
        assert other.put(name(1, incarnation=1), b"b" * SIZE)
        return file

    monkeypatch.setattr(os, "open", stop_after)
    assert not memory.put(name(0), b"a" * SIZE)
    assert other.get(name(1, incarnation=1), SIZE) == b"b" * SIZE


@pytest.mark.parametrize(
    "text", ["../../etc/passwd:0:0:" + "0" * 32, "worker-0:0:0:short", f"{FREE}/{name(0)}", "owner"]
)
def test_foreign_name_never_leads_out_of_the_folder(memory: SharedMemory, text: str) -> None:
    assert not memory.put(text, b"x" * SIZE)
    assert memory.get(text, SIZE) is None


def test_link_in_place_of_a_body_is_not_followed(folder: MemoryFolder, memory: SharedMemory, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x" * SIZE)
    (folder.path / name(0)).symlink_to(tmp_path / "secret")
    assert not memory.put(name(0), b"y" * SIZE)
    with pytest.raises(ShardUnavailable, match="cannot be read"):
        memory.get(name(0), SIZE)
    assert (tmp_path / "secret").read_bytes() == b"x" * SIZE


def test_body_without_room_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container, where /dev/shm has 64 MB."""
    monkeypatch.setattr(memory_folder, "ROOT", tmp_path / "shm")
    with small_tmpfs(tmp_path / "shm", "4m"), closing(MemoryFolder(tmp_path)) as folder:
        memory = SharedMemory(str(folder.path))
        written = [memory.put(name(seq), b"x" * (1 << 20)) for seq in range(4)]
        assert written == [True, False, False, False], "half of it stays free for others"
        assert memory.names() == [name(0)]
        assert memory.remove([name(0)]) == 1 and memory.put(name(5), b"x" * (1 << 20))


def test_write_that_fails_half_way_leaves_nothing_behind(memory: SharedMemory) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, limits[1]))
    try:
        written = memory.put(name(0), b"x" * SIZE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (written, memory.names()) == (False, [])


def test_folder_that_disappears_is_survived(folder: MemoryFolder, memory: SharedMemory) -> None:
    """As if the system had removed what a user who logged out had in /dev/shm."""
    assert memory.put(name(0), b"x" * SIZE)
    shutil.rmtree(folder.path)
    assert memory.get(name(0), SIZE) is None and not memory.put(name(1), b"x" * SIZE)
    assert memory.names() == [] and memory.remove([name(0)]) == 0


def test_unusable_memory_root_leaves_bodies_in_redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_folder, "ROOT", tmp_path / "missing")
    memory_folder.clear_abandoned_memory()
    assert memory_folder.open_memory(tmp_path) is None
    assert not SharedMemory() and SharedMemory().token == ""


def test_worker_shares_only_the_memory_that_the_trainer_reads(
    make_role: MakeRole, memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers share names and addresses, but no /dev/shm: the token decides, and the next trainer's word counts."""
    monkeypatch.setattr(payload_shards, "AT_LEAST", 1)
    blind = make_role(small_config(max_policy_lag=2))
    seeing = in_memory(blind, memory)
    begin(blind)
    worker = SmallWorker(seeing)
    worker.work()
    assert bytes_by_shard(blind.redis, blind.run_id) == {}, "this trainer does not see it"
    trainer = begin(seeing)
    worker.work(blob=b"x" * 500)
    SmallWorker(blind, "worker-1").work()
    assert bytes_by_shard(blind.redis, blind.run_id) == {PLACE: 500}
    assert [entry.fragment and len(entry.fragment) for entry in trainer.log.read("0-0", 9, 0.0)][1] == 500
    begin(blind)
    worker.work()
    assert bytes_by_shard(blind.redis, blind.run_id) == {PLACE: 500}


def test_small_body_stays_in_the_log(memory: SharedMemory) -> None:
    bodies = Bodies({}, "run", memory)
    assert bodies.share("worker-0", 0, 0, b"x" * (AT_LEAST - 1), memory.token) is None
    assert bodies.share("worker-0", 0, 0, b"x" * AT_LEAST, memory.token) is not None
    assert bodies.share("worker-0", 0, 0, b"x" * AT_LEAST, "another") is None
