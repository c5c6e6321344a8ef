"""What is said of a disk that is full or fails: why, where, and what to do; for Redis, the store, and log files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

_REASONS = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT))
_SPARE_BYTES = 64 << 10
"""For the folders and names of what is written."""


def unwritten(reason: str, place: str) -> str:
    """Of something that cannot write at `place` for this reason, as the kernel or Redis names it."""
    if reason in _REASONS:
        return f"its disk is full ({reason}): make room in the file system of {place}"
    return f"it cannot write to its disk ({reason}): see to the file system of {place}"


def lacks_room(folder: Path, needed_bytes: int) -> str | None:
    """The same of a folder of this machine, where nothing of this size fits into it any more; None else."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    free, no_files = found.f_bavail * found.f_frsize, bool(found.f_files and not found.f_favail)
    return unwritten(_REASONS[0], str(folder)) if no_files or free < needed_bytes + _SPARE_BYTES else None
