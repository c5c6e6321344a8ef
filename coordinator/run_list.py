"""The runs of this machine, one line each.

A run that has ended here, with services of its own, is told from its files alone, without the modules that a live one
or one in a bucket needs: those take a second to import.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from shared.errors import StagecoachError

CONFIG, LOCK = "config.yaml", "lock"
INTERRUPTED = "no coordinator is running it; continue it with `stagecoach resume`"
"""The reason that a run has which neither is live nor has ended."""


@dataclass(frozen=True)
class RunRow:
    """What `stagecoach runs` shows of a run; `best` is the confirmed mean return of its best checkpoint."""

    run_id: str
    state: str
    env_steps: int
    best: float | None
    reason: str


def run_paths(runs_dir: Path) -> list[Path]:
    """The folders of all runs, oldest first."""
    runs_dir = runs_dir.expanduser()
    if not runs_dir.is_dir():
        return []
    found = [path for path in runs_dir.resolve().iterdir() if (path / CONFIG).is_file()]
    return sorted(found, key=lambda path: path.stat().st_ctime)


def former_name(path: Path) -> str | None:
    """The id of the run whose embedded bucket is in a folder of another name, a copy; None where the names agree."""
    found = [folder.name for folder in (path / "s3").glob("*/*") if folder.is_dir()]
    return next(iter(found), None) if path.name not in found else None


def is_locked(path: Path) -> bool:
    """Whether a coordinator holds the run in this folder right now."""
    try:
        handle = os.open(path / LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def list_runs(runs_dir: Path) -> list[RunRow]:
    """All runs; one that cannot be read says why."""
    return [_from_files(path) or _asked(path) for path in run_paths(runs_dir)]


def is_all_here(path: Path) -> bool:
    """Whether Redis and store of a run are parts of its folder; raises `ValueError` where its config is none."""
    try:
        config = yaml.load((path / CONFIG).read_text(), Loader=yaml.CSafeLoader)
        embedded = config["redis"]["url"] == config["store"]["url"] == "embedded"
    except (KeyError, TypeError, yaml.YAMLError) as error:
        raise ValueError(f"{path / CONFIG} is no resolved config: {error}") from error
    return embedded and not (path / "elsewhere.json").exists()


def _from_files(path: Path) -> RunRow | None:
    """None where the files of this folder do not tell all: the run is live, or lives elsewhere, or they are damaged."""
    try:
        if not is_all_here(path) or is_locked(path) or former_name(path):
            return None
        store = next((path / "s3").glob(f"*/{path.name}"), path / "s3")  # the only bucket of the embedded server
        finished, kept = _read(store / ".finished"), _read(store / "training_status.json") or {}
        entries = kept.get("checkpoints", [])
        counts = (finished or {}).get("counters") or {}
        steps = counts.get("train", {}).get("env_steps", entries[-1]["env_steps"] if entries else 0)
        best = next((entry["evaluation"] for entry in entries if entry["name"] == kept.get("best")), None)
        score = (best or {}).get("confirmation")
        reason = finished["reason"] if finished else INTERRUPTED
        state = "finished" if finished else "interrupted"
        return RunRow(path.name, state, int(steps), float(score["mean_return"]) if score else None, str(reason))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _asked(path: Path) -> RunRow:
    """From Redis and the store, as `stagecoach status` does it."""
    from coordinator.run import Run
    from shared.events import confirmed_return

    try:
        handle = Run.attach(path.name, path.parent)
        found = handle.status()
        best = next((entry for entry in handle.checkpoints() if "best" in entry["marks"]), None)
        score = confirmed_return(best["evaluation"]) if best and best["evaluation"] else None
        return RunRow(path.name, found.state, found.env_steps, score, found.reason)
    except StagecoachError as error:
        return RunRow(path.name, "unreadable", 0, None, str(error))


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None
