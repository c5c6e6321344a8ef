"""The folder of shared memory that a run with an embedded Redis has while its coordinator lives.

Its bodies are part of the run's log, so they outlive the coordinator: at its end, or, after a kill, at the next start
of any run, they move to the disk, next to the data of the run's Redis.
"""

import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path

from stagecoach.coordinator.services.embedded import ServiceError, abandoned_folders, hold_folder
from stagecoach.shared.base import world
from stagecoach.shared.protocol.shared_memory import BODY, FREE, OWNER, kept_bodies

ROOT = Path("/dev/shm")
_PREFIX = "stagecoach-"
_OTHERS_SECONDS = 60.0
"""Time for another start to move the bodies of a killed run."""
_POLL_SECONDS = 0.2
_LOGGER = logging.getLogger("stagecoach.coordinator")


class MemoryFolder:
    """A folder in shared memory, and the lock that shows that it is in use."""

    def __init__(self, redis_folder: Path) -> None:
        """Raises `OSError` if shared memory is missing or read-only for this user."""
        content = f"{world.token_hex(16)}\n{kept_bodies(redis_folder)}"
        self.path, self._owner = hold_folder(ROOT, _PREFIX, os.fsencode(content))
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


def clear_abandoned_memory() -> dict[Path, str]:
    """Moves the bodies of runs whose coordinators were killed to the disk, and removes their folders.

    Returns why a folder stays: {folder: reason}.
    """
    found = {path: _move_to_disk(path) for path in abandoned_folders(ROOT, _PREFIX)}
    return {path: reason for path, reason in found.items() if reason}


def recover_memory(redis_folder: Path) -> None:
    """Waits until all bodies of this run, whose coordinator was killed, are on the disk; another start may move them.

    Raises `ServiceError` if they cannot move there: without them, the run would count them as lost.
    """
    kept, deadline = os.fsencode(kept_bodies(redis_folder)), world.monotonic() + _OTHERS_SECONDS
    while True:
        failed = clear_abandoned_memory()
        left = [path for path in ROOT.glob(f"{_PREFIX}*") if _keeps_in(path) == kept]
        if not left:
            return
        reasons = [failed[path] for path in left if path in failed]
        if reasons or world.monotonic() > deadline:
            reason = reasons[0] if reasons else f"another start has not moved them within {_OTHERS_SECONDS:g} s"
            raise ServiceError(
                f"fragments of this run are still in {left[0]} and cannot move to {kept_bodies(redis_folder)}: "
                f"{reason}; free some disk, and resume the run again"
            )
        world.sleep(_POLL_SECONDS)


def _keeps_in(path: Path) -> bytes:
    """The folder on disk for these bodies; empty if it cannot be read."""
    with suppress(OSError):
        return (path / OWNER).read_bytes().partition(b"\n")[2]
    return b""


def _move_to_disk(path: Path) -> str:
    """Removes `owner` last, so that another start can complete what a kill has interrupted. Returns why it failed."""
    gone = path.with_suffix(".gone")
    try:
        path.rename(gone)  # a worker that lives on writes nothing there any more
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
        _LOGGER.warning("bodies of fragments stay in %s, since they cannot move to the disk: %s", gone, error)
        return str(error)
    return ""
