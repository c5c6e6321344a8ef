"""Files of this machine's disk: replaced whole or not at all, synced; and what is wrong with a full disk, in words."""

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from stagecoach.shared.base import world

TEMPORARY = ".partial-"
"""Prefix of files that are being written, or that a killed writer left."""
_REASONS = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT))
_SPARE_BYTES = 64 << 10
"""Reserve for the file system's own metadata."""


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """A file to write to; when the block ends, it takes the place of `path`, whole and synced, or not at all."""
    temporary = path.with_name(f"{TEMPORARY}{world.token_hex(8)}")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def private_folder(path: Path) -> Path:
    """Creates the folder if it is missing, for this user alone; raises `PermissionError` if it is somebody else's."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{path} is not a private folder of this user")
    return path


def folders_of(path: Path, root: Path) -> list[Path]:
    """The folders of `path`, through `root`: a name outlives a power failure only once its folder is on the disk."""
    return [folder for folder in path.parents if folder.is_relative_to(root)]


def sync(paths: Iterable[Path]) -> None:
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def unwritten(reason: str, place: str) -> str:
    """Returns the remedy for a write error at `place`; `reason` is the kernel's or Redis's text."""
    if reason in _REASONS:
        return f"its disk is full ({reason}): make room in the file system of {place}"
    return f"it cannot write to its disk ({reason}): check the file system of {place}"


def lacks_room(folder: Path, needed_bytes: int) -> str | None:
    """Returns the remedy if this machine's `folder` has no space for so many bytes; None otherwise."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    free, no_files = found.f_bavail * found.f_frsize, bool(found.f_files and not found.f_favail)
    return unwritten(_REASONS[0], str(folder)) if no_files or free < needed_bytes + _SPARE_BYTES else None
