"""State of a run from the files of its folder, without slow imports, for `stagecoach runs` and shell completion."""

import fcntl
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

CONFIG, REMOTE, LOCK = "config.yaml", "remote.json", "lock"
INTERRUPTED_REASON = "no coordinator is running it; `{}` continues it"


class RunStatus(StrEnum):
    """State of a run, in `stagecoach status` and `stagecoach runs`."""

    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    """No coordinator, and no `.finished`."""
    PAUSED = "paused"
    """Live, and waiting for its Redis."""
    STARTING_OR_ENDING = "starting or ending"
    UNKNOWN = "unknown"
    """The run is on other machines, and its Redis is unreachable."""
    UNREADABLE = "unreadable"


def run_paths(runs_dir: Path) -> list[Path]:
    found = (path.parent for path in runs_dir.expanduser().resolve().glob(f"[!.]*/{CONFIG}"))
    return sorted(found, key=lambda path: path.stat().st_ctime)


def former_name(path: Path) -> str | None:
    """Id of the run in a copied or renamed folder; None if the names agree."""
    found = [folder.name for folder in (path / "s3").glob("*/*") if folder.is_dir()]
    return next(iter(found), None) if path.name not in found else None


def is_locked(path: Path) -> bool:
    """Returns whether a coordinator holds the run in this folder."""
    try:
        with (path / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def resolved_config(path: Path) -> Any:
    """Returns the plain data in a run's config file, which is parsed again only after it has changed."""
    return _parsed(path / CONFIG, (path / CONFIG).stat().st_mtime_ns)


@lru_cache(maxsize=1000)
def _parsed(file: Path, _: int) -> Any:
    return yaml.load(file.read_text(), Loader=yaml.CSafeLoader)


def is_all_here(path: Path) -> bool:
    """Returns whether Redis and store are in the run's folder; raises `ValueError` for an invalid config."""
    try:
        config = resolved_config(path)
        embedded = config["redis"]["url"] == config["store"]["url"] == "embedded"
    except (KeyError, TypeError, yaml.YAMLError) as error:
        raise ValueError(f"{path / CONFIG} is not a resolved config: {error}") from error
    return embedded and not (path / REMOTE).exists()
