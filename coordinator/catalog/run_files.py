"""What the files of a run's folder tell, without the modules that a live run or one in a bucket needs.

Those take a second to import, which `stagecoach runs` and the completion of a shell do without.
"""

import fcntl
from enum import StrEnum
from pathlib import Path

import yaml

CONFIG, REMOTE, LOCK = "config.yaml", "remote.json", "lock"
INTERRUPTED_REASON = "no coordinator is running it; `{}` continues it"


class RunStatus(StrEnum):
    """What `stagecoach status` and `stagecoach runs` say of a run."""

    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    """No coordinator, and no `.finished`."""
    PAUSED = "paused"
    """Live, and waiting for its Redis."""
    STARTING_OR_ENDING = "starting or ending"
    UNKNOWN = "unknown"
    """It is on other machines, and this one does not reach its Redis."""
    UNREADABLE = "unreadable"


def run_paths(runs_dir: Path) -> list[Path]:
    found = (path.parent for path in runs_dir.expanduser().resolve().glob(f"*/{CONFIG}"))
    return sorted(found, key=lambda path: path.stat().st_ctime)


def former_name(path: Path) -> str | None:
    """The id of the run whose embedded bucket is in a folder of another name, a copy; None where the names agree."""
    found = [folder.name for folder in (path / "s3").glob("*/*") if folder.is_dir()]
    return next(iter(found), None) if path.name not in found else None


def is_locked(path: Path) -> bool:
    """Whether a coordinator holds the run in this folder right now."""
    try:
        with (path / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def is_all_here(path: Path) -> bool:
    """Whether Redis and store of a run are parts of its folder; raises `ValueError` where its config is none."""
    try:
        config = yaml.load((path / CONFIG).read_text(), Loader=yaml.CSafeLoader)
        embedded = config["redis"]["url"] == config["store"]["url"] == "embedded"
    except (KeyError, TypeError, yaml.YAMLError) as error:
        raise ValueError(f"{path / CONFIG} is no resolved config: {error}") from error
    return embedded and not (path / REMOTE).exists()
