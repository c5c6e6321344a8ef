"""The folder of shared memory that a run with an embedded Redis has while its coordinator lives.

Its bodies are part of the run's log, so they outlive the coordinator: at its end, or, after a kill, at the next start
of any run, they move to the disk, next to the data of the run's Redis.
"""

import logging
import os
import secrets
import shutil
from pathlib import Path

from stagecoach.coordinator.services.embedded import abandoned_folders, hold_folder
from stagecoach.shared.protocol.shared_memory import BODY, FREE, OWNER, kept_bodies

ROOT = Path("/dev/shm")
_PREFIX = "stagecoach-"
_LOGGER = logging.getLogger("stagecoach.coordinator")


class MemoryFolder:
    """A folder in shared memory, and the lock that shows that it is in use."""

    def __init__(self, redis_folder: Path) -> None:
        """Raises `OSError` if shared memory is missing or read-only for this user."""
        content = f"{secrets.token_hex(16)}\n{kept_bodies(redis_folder)}"
        self.path, self._owner = hold_folder(str(ROOT), _PREFIX, os.fsencode(content))
        (self.path / FREE).mkdir(0o700)

    def close(self) -> None:
        """Moves the bodies to the disk and removes the folder."""
        _move_to_disk(self.path)
        self._owner.close()


def open_memory(redis_folder: Path) -> MemoryFolder | None:
    """Creates the folder of a run whose Redis keeps its data in `redis_folder`; None where that is not possible."""
    try:
        return MemoryFolder(redis_folder)
    except OSError as error:
        _LOGGER.info("Redis holds all bodies of fragments, since %s is not usable: %s", ROOT, error)
        return None


def clear_abandoned_memory() -> None:
    """Moves the bodies of runs whose coordinators were killed to the disk, and removes their folders."""
    for path in abandoned_folders(ROOT, _PREFIX):
        _move_to_disk(path)


def _move_to_disk(path: Path) -> None:
    """Removes `owner` last, so that another start can complete what a kill has interrupted."""
    try:
        gone = path.rename(path.with_suffix(".gone"))  # a worker that lives on writes nothing there any more
        kept = Path(os.fsdecode((gone / OWNER).read_bytes()).partition("\n")[2])
        for name in {*os.listdir(gone)} - {OWNER}:
            if BODY.fullmatch(name) and kept.parent.is_dir():  # else the run was deleted
                kept.mkdir(mode=0o700, exist_ok=True)
                shutil.move(gone / name, kept / name)
            elif (gone / name).is_dir():
                shutil.rmtree(gone / name)
            else:
                (gone / name).unlink()
        shutil.rmtree(gone)
    except FileNotFoundError as error:
        _LOGGER.warning("bodies of fragments that were in %s are lost: %s", path, error)
    except OSError as error:  # nothing is lost: the next start of a run tries again
        _LOGGER.warning("bodies of fragments stay in %s, since they cannot move to the disk: %s", path, error)
