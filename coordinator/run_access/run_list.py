"""List of this machine's runs, from their files if possible, else from Redis and the store."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from stagecoach.coordinator.catalog.run_files import (
    INTERRUPTED_REASON,
    RunStatus,
    former_name,
    is_all_here,
    is_locked,
    resolved_config,
    run_paths,
)
from stagecoach.shared.base.errors import StagecoachError


@dataclass(frozen=True)
class RunRow:
    """Row of `stagecoach runs`; `best` is the score of the second evaluation, which confirmed the best checkpoint."""

    run_id: str
    state: RunStatus
    env_steps: int
    best: float | None
    reason: str
    ranked_by: str = ""
    """Name of the score `best`, unless it is the mean return."""
    created: float | None = None
    """Unix seconds of the oldest file in the run's folder."""
    environment: str = ""
    algorithm: str = ""


def list_runs(runs_dir: Path) -> list[RunRow]:
    rows = {path: _row_from_files(path) or row_from_servers(path) for path in run_paths(runs_dir)}
    return [replace(row, **_described(path)) for path, row in rows.items()]


def _described(path: Path) -> dict[str, Any]:
    """Returns creation time, environment and algorithm; nothing if the config file is damaged or being deleted."""
    try:
        config, created = resolved_config(path), min(file.stat().st_mtime for file in path.iterdir() if file.is_file())
        names = str(config["environment"]["id"]), str(config["algorithm"]["name"])
    except (OSError, KeyError, TypeError, ValueError, yaml.YAMLError):
        return {}
    return dict(zip(("created", "environment", "algorithm"), (created, *names), strict=True))


def _row_from_files(path: Path) -> RunRow | None:
    """Reads a row from the folder's files; None if the run is live or remote, or a file is damaged."""
    try:
        if not is_all_here(path) or is_locked(path) or former_name(path):
            return None
        store = next((path / "s3").glob(f"*/{path.name}"), path / "s3")  # the only bucket of the embedded server
        finished, kept = _read(store / ".finished"), _read(store / "training_status.json")
        entries = kept.get("checkpoints", [])
        counts = (finished.get("counters") or {}).get("train") or (entries[-1] if entries else {})
        best = next((entry["evaluation"] for entry in entries if entry["name"] == kept.get("best")), None) or {}
        confirmed = best.get("confirmation") or {}
        rank = confirmed.get("ranking", confirmed.get("mean_return"))  # `events.ranking`, but import-free
        score = None if rank is None else float(rank)
        state = RunStatus.FINISHED if finished else RunStatus.INTERRUPTED
        reason = str(finished.get("reason", INTERRUPTED_REASON.format(f"stagecoach resume {path.name}")))
        by = str(confirmed.get("ranked_by", ""))
        return RunRow(path.name, state, int(counts.get("env_steps", 0)), score, reason, by)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def row_from_servers(path: Path) -> RunRow:
    """Reads a row from Redis and the store, like `stagecoach status`."""
    import redis

    from stagecoach.coordinator.run_access.run import Run  # imports torch: not before it is needed
    from stagecoach.shared.protocol.events import ranking

    try:
        found = Run.attach(path.name, path.parent).status()
        scores = found.best_evaluation
        score, by = (ranking(scores), scores.get("ranked_by", "")) if scores else (None, "")
        return RunRow(path.name, found.state, found.env_steps, score, found.reason, by)
    except (StagecoachError, redis.RedisError, OSError) as error:  # the run may be ending or being deleted
        return RunRow(path.name, RunStatus.UNREADABLE, 0, None, str(error))


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else {}
