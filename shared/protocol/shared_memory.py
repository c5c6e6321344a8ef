"""Bodies of fragments in memory that the processes of one host share: a file each, in a private folder of /dev/shm.

The coordinator creates the folder (coordinator/services/memory_folder.py). Containers may share names and addresses
but no memory, so a trainer announces in Redis the token that it reads in the folder. A worker writes there only if it
reads the same token. Everything that does not fit stays in Redis.
"""

import errno
import fcntl
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Self

from stagecoach.shared.base.address import Address
from stagecoach.shared.base.errors import ShardUnavailable

PLACE = "shared-memory"
"""Name of this place in a log entry, where a shard has its address."""
AT_LEAST = 48 << 10
"""Smallest body (bytes) for which a file costs less than the way through Redis (`benchmarks transport`)."""
OWNER = "owner"
"""File of the folder that names its token, and the folder on disk that takes over its bodies."""
BODY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}:[0-9]{1,15}:[0-9]{1,15}:[0-9a-f]{32}")
"""Names of bodies: `worker:incarnation:seq:digest`."""
FREE = "free"
"""Subfolder of files whose bodies nobody needs; writing over their pages costs a fifth of new pages."""
_ABSENT = (errno.ENOENT, errno.ENOTDIR)


class SharedMemory:
    """The bodies in the run's folder, and those on disk that former starts of the run left unread."""

    def __init__(self, folder: str | None = None, kept: str | None = None) -> None:
        self._folder, self._kept = folder or "", kept or ""
        self._free: list[str] = []

    @classmethod
    def of(cls, address: Address) -> Self:
        """The memory of a run with an embedded Redis; of another run one that holds nothing."""
        return cls(address.memory_folder, address.redis_folder and kept_bodies(Path(address.redis_folder)))

    def __bool__(self) -> bool:
        return bool(self.token) or os.path.isdir(self._kept)

    @cached_property
    def token(self) -> str:
        """Token in the folder; empty if this process does not see the folder."""
        if not self._folder:
            return ""
        with suppress(OSError):
            if os.stat(self._folder).st_uid == os.getuid():
                return Path(self._folder, OWNER).read_text().partition("\n")[0]
        return ""

    def put(self, name: str, body: bytes) -> bool:
        """Writes one body, safe to repeat; returns False if it has no room.

        A repeat writes the same bytes over the same file, so nobody ever reads half of a body that the log names.
        """
        if not BODY.fullmatch(name):
            return False
        path = f"{self._folder}/{name}"
        with suppress(OSError):
            if not os.path.exists(path):
                self._reuse(path)
            with _open(path, os.O_WRONLY | os.O_CREAT) as file:
                if not _locked(file, path):
                    return False
                try:
                    if os.fstat(file).st_size < len(body):
                        self._check_room(len(body))
                    rest = memoryview(body)
                    while rest:
                        rest = rest[os.write(file, rest) :]
                    os.ftruncate(file, len(body))
                except OSError:  # no room, or a limit of this process
                    os.unlink(path)
                    return False
            return True
        return False

    def rename(self, name: str, to: str) -> None:
        """Gives a body's file to another body, which is put there next, if the file is there."""
        with suppress(OSError):
            os.rename(f"{self._folder}/{name}", f"{self._folder}/{to}")

    def get(self, name: str, size: int) -> bytes | None:
        """Returns a body of `size` bytes, or None if it is missing; raises `ShardUnavailable`."""
        if not BODY.fullmatch(name):  # another program's, which must not lead out of the folder
            return None
        for folder in filter(None, (self._folder, self._kept)):
            try:
                with _open(f"{folder}/{name}", os.O_RDONLY) as file:
                    body = os.read(file, size) if os.fstat(file).st_size == size else None
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise ShardUnavailable(f"the body {folder}/{name} cannot be read: {error.strerror}") from None
                continue
            if body is not None and len(body) == size:
                return body
        return None

    def holds(self, name: str) -> bool:
        """Returns whether a body is in the folder."""
        return os.path.exists(f"{self._folder}/{name}")

    def names(self) -> list[str]:
        """Returns the names of all bodies."""
        found: set[str] = set()
        for folder in filter(None, (self._folder, self._kept)):
            with suppress(OSError):
                found.update(name for name in os.listdir(folder) if BODY.fullmatch(name))
        return sorted(found)

    def remove(self, names: Iterable[str]) -> int:
        """Removes bodies that nobody needs; returns how many. Their files are used again until the next removal."""
        removed, unused = 0, f"{self._folder}/{FREE}"
        with suppress(OSError):
            for name in os.listdir(unused):
                os.unlink(f"{unused}/{name}")
        for name in names:
            path = f"{self._folder}/{name}"
            with suppress(OSError), _open(path, os.O_WRONLY) as file:
                if _locked(file, path):
                    os.rename(path, f"{unused}/{name}")
                    removed += 1
            with suppress(OSError):
                os.unlink(f"{self._kept}/{name}")
                removed += 1
        return removed

    def _reuse(self, path: str) -> None:
        """Moves a free file to `path`, if there is one; each goes to the process that moves it."""
        unused = f"{self._folder}/{FREE}"
        if not self._free:
            with suppress(OSError):
                self._free = os.listdir(unused)
        while self._free:
            with suppress(OSError):
                os.rename(f"{unused}/{self._free.pop()}", path)
                return

    def _check_room(self, size: int) -> None:
        """Raises `OSError` if less than half of the memory's file system would stay free: others need it, too."""
        found = os.statvfs(self._folder)
        if found.f_bavail * found.f_frsize - size < found.f_blocks * found.f_frsize // 2:
            raise OSError(errno.ENOSPC, "at most half of the shared memory is used")


@contextmanager
def _open(path: str, flags: int) -> Iterator[int]:
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        yield file
    finally:
        if flags != os.O_RDONLY:  # a child that was forked meanwhile would keep the lock
            fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


def _locked(file: int, path: str) -> bool:
    """Locks an open file; returns False if another process writes or moves it, or has moved it.

    So a process that was stopped here for long never writes into a file that has another body by now.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.stat(path).st_ino == os.fstat(file).st_ino


def kept_bodies(redis_folder: Path) -> str:
    """Folder, among the data of an embedded Redis, of the bodies that its log names and no memory holds any more."""
    return str(redis_folder / "bodies")
