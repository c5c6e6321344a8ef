"""The folder in shared memory: held while its process lives, and tidied by whoever starts next."""

from __future__ import annotations

import fcntl
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from stagecoach.coordinator.services import memory_folder
from stagecoach.coordinator.services.embedded import ServiceError
from stagecoach.coordinator.services.memory_folder import MemoryFolder, clear_abandoned_memory, recover_memory
from stagecoach.shared.protocol.shared_memory import FREE, OWNER, SharedMemory, kept_bodies
from tests.support.runs.builders import small_tmpfs

BODY = f"worker-0:0:0:{0:032x}"
HOLD = """
import sys, time
from pathlib import Path
from stagecoach.coordinator.services import memory_folder
memory_folder.ROOT = Path(sys.argv[1])
held = memory_folder.MemoryFolder(Path(sys.argv[2]))
print(held.path, flush=True)
time.sleep(20)
"""


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A part of the real memory, without the folders of other runs."""
    with tempfile.TemporaryDirectory(dir=memory_folder.ROOT) as found:
        monkeypatch.setattr(memory_folder, "ROOT", Path(found))
        yield Path(found)


@pytest.fixture
def killed(root: Path, tmp_path: Path) -> Path:
    """The folder of a process that was killed, with a body and a free file."""
    (tmp_path / "redis").mkdir()
    arguments = [sys.executable, "-c", HOLD, str(root), str(tmp_path / "redis")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert SharedMemory(str(folder)).put(BODY, b"body")
        (folder / FREE / "free").write_bytes(b"free")
        (folder / "a folder of somebody").mkdir()
        clear_abandoned_memory()
        assert list(root.iterdir()) == [folder], "its process lives"
        process.send_signal(signal.SIGKILL)
    return folder


def kept(tmp_path: Path) -> SharedMemory:
    return SharedMemory(None, kept_bodies(tmp_path / "redis"))


def test_bodies_of_a_killed_run_move_to_its_disk(killed: Path, root: Path, tmp_path: Path) -> None:
    with closing(MemoryFolder(tmp_path / "other")) as live:
        clear_abandoned_memory()
        assert list(root.iterdir()) == [live.path]
    assert kept(tmp_path).names() == [BODY] and kept(tmp_path).get(BODY, 4) == b"body"
    assert (tmp_path / "redis" / "bodies").stat().st_mode & 0o777 == 0o700
    assert kept(tmp_path).remove([BODY]) == 1 and list(root.iterdir()) == []


def test_clearing_completes_what_a_kill_has_interrupted(killed: Path, root: Path, tmp_path: Path) -> None:
    (tmp_path / "redis" / "bodies").mkdir()
    (tmp_path / "redis" / "bodies" / BODY).write_bytes(b"bo")
    killed.rename(killed.with_suffix(".gone"))
    clear_abandoned_memory()
    assert kept(tmp_path).get(BODY, 4) == b"body" and list(root.iterdir()) == []


def test_memory_of_a_deleted_run_is_cleared(killed: Path, root: Path, tmp_path: Path) -> None:
    (tmp_path / "redis").rmdir()
    clear_abandoned_memory()
    assert list(root.iterdir()) == [] and not (tmp_path / "redis").exists()


def test_bodies_wait_in_memory_while_the_disk_is_full(killed: Path, root: Path, tmp_path: Path) -> None:
    (tmp_path / "redis").rmdir()
    with small_tmpfs(tmp_path / "redis", "4k"):
        (tmp_path / "redis" / "data").write_bytes(b"x" * 4096)
        clear_abandoned_memory()
        (folder,) = root.iterdir()
        assert SharedMemory(str(folder)).get(BODY, 4) == b"body"
        with pytest.raises(ServiceError, match=r"fragments of this run .* No space left .* free some disk"):
            recover_memory(tmp_path / "redis")
        recover_memory(tmp_path / "another run" / "redis")
    (tmp_path / "redis" / "now").mkdir(parents=True)
    clear_abandoned_memory()
    assert list(root.iterdir()) == [] and kept(tmp_path).get(BODY, 4) == b"body"


def test_recovery_waits_for_another_start_that_moves_the_bodies(killed: Path, root: Path, tmp_path: Path) -> None:
    with (killed / OWNER).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        released = threading.Timer(0.5, lock.close)
        released.start()
        recover_memory(tmp_path / "redis")
    assert kept(tmp_path).get(BODY, 4) == b"body" and list(root.iterdir()) == []


def test_close_of_a_folder_that_is_gone_is_harmless(root: Path, tmp_path: Path) -> None:
    folder = MemoryFolder(tmp_path)
    shutil.rmtree(folder.path)
    folder.close()
    assert list(root.iterdir()) == []
