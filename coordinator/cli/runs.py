"""`stagecoach runs` and `stagecoach delete`.

The runs of this machine are listed from their files where those tell all, else from Redis and the store. A run is
deleted with its keys in Redis and its objects in the store.
"""

import contextlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.catalog.run_files import INTERRUPTED_REASON, RunStatus, former_name, is_all_here, is_locked, run_paths
from coordinator.cli.options import RUNS, Exit, Json, RunArgument, RunsDir, console, example, figure, print_json
from shared.errors import RunNotFound, StagecoachError, UserError
from shared.printable import counted
from shared.runtime.failure import reason_in_words

if TYPE_CHECKING:
    from coordinator.run import Run

app = typer.Typer()
_BATCH = 500


@dataclass(frozen=True)
class RunRow:
    """What `stagecoach runs` shows of a run; `best` is the confirmed mean return of its best checkpoint."""

    run_id: str
    state: RunStatus
    env_steps: int
    best: float | None
    reason: str


@app.command(epilog=example("stagecoach runs --json"))
def runs(runs_dir: RunsDir = RUNS, as_json: Json = False) -> None:
    """List the runs of this machine."""
    from rich.table import Table

    rows = list_runs(runs_dir)
    table = Table("run", "state", "env steps", "best", "reason")
    for row in rows:
        reason = reason_in_words(row.reason.partition("\n")[0])
        table.add_row(row.run_id, row.state, f"{row.env_steps:,}", figure(row.best), reason)
    if as_json:
        print_json(rows)
    else:
        console.print(table if rows else f"no runs in {runs_dir}; start one: stagecoach train cartpole")


def list_runs(runs_dir: Path) -> list[RunRow]:
    return [_row_from_files(path) or row_from_servers(path) for path in run_paths(runs_dir)]


def _row_from_files(path: Path) -> RunRow | None:
    """None where the files of this folder do not tell all: the run is live, or remote, or they are damaged."""
    try:
        if not is_all_here(path) or is_locked(path) or former_name(path):
            return None
        store = next((path / "s3").glob(f"*/{path.name}"), path / "s3")  # the only bucket of the embedded server
        finished, kept = _read(store / ".finished"), _read(store / "training_status.json")
        entries = kept.get("checkpoints", [])
        counts = (finished.get("counters") or {}).get("train") or (entries[-1] if entries else {})
        best = next((entry["evaluation"] for entry in entries if entry["name"] == kept.get("best")), None) or {}
        score = float(best["confirmation"]["mean_return"]) if best.get("confirmation") else None
        state = RunStatus.FINISHED if finished else RunStatus.INTERRUPTED
        reason = str(finished.get("reason", INTERRUPTED_REASON))
        return RunRow(path.name, state, int(counts.get("env_steps", 0)), score, reason)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def row_from_servers(path: Path) -> RunRow:
    """From Redis and the store, as `stagecoach status` does it."""
    from coordinator.run import Run  # imports torch: not before it is needed
    from shared.protocol.events import confirmed_return

    try:
        handle = Run.attach(path.name, path.parent)
        found = handle.status()
        best = next((entry for entry in handle.checkpoints() if "best" in entry["marks"]), None)
        score = confirmed_return(best["evaluation"]) if best and best["evaluation"] else None
        return RunRow(path.name, found.state, found.env_steps, score, found.reason)
    except StagecoachError as error:
        return RunRow(path.name, RunStatus.UNREADABLE, 0, None, str(error))


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else {}


@app.command(epilog=example("stagecoach delete my-run --yes"))
def delete(
    run: RunArgument,
    runs_dir: RunsDir = RUNS,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a run that is not live: its folder, and what it has in Redis and in the store, checkpoints included."""
    _delete(run, runs_dir, ask=not yes)


def delete_former(run_id: str | None, runs_dir: Path) -> None:
    """For `train --force`: deletes the run that has this id, where there is one."""
    if run_id is None:
        raise UserError("--force deletes the run that --run-id names; give that as well")
    with contextlib.suppress(RunNotFound):
        _delete(run_id, runs_dir, ask=False)


def _delete(run_id: str, runs_dir: Path, ask: bool) -> None:
    """First Redis, then the store, the folder last, so that what was cut off can be called again."""
    from coordinator.catalog.run_folder import RunFolder
    from coordinator.run import Run

    folder = RunFolder.find(run_id, runs_dir)
    try:
        run = None if is_all_here(folder.path) else Run.attach(run_id, runs_dir)
    except ValueError as error:
        raise UserError(f"{error}; what it has in Redis and a store is not known") from None
    if run.live if run else folder.live:
        raise UserError(f"run {run_id!r} is live; end it first: stagecoach stop {run_id}")
    what, objects = f"run {run_id}: {folder.path}", list[str]()
    if run:
        objects = run.checkpoint_store().store.keys("")
        what += f", {counted(len(objects), 'object')} in {run.store_location}, its keys in Redis"
    if ask and not sys.stdin.isatty():
        raise UserError(f"this would delete {what}; there is no terminal to ask at, so say --yes")
    if ask and not typer.confirm(f"delete {what}? This cannot be undone"):
        raise typer.Exit(Exit.REFUSED)
    with folder.locked():
        if run:
            _forget_keys(run)
            store = run.checkpoint_store().store
            for key in objects:
                store.delete(key)
        folder.remove()
    console.text(f"deleted {what}")


def _forget_keys(run: "Run") -> None:
    from redis.exceptions import NoPermissionError

    from shared.protocol.keys import RunKeys
    from shared.protocol.redis_client import connect_redis, shard_clients

    if run.config.redis.url == "embedded":
        return
    prefix, address = RunKeys(run.run_id).prefix, run.folder.offline_address(run.config)
    shards = shard_clients(address, run.config, "coordinator").values()
    for client in (connect_redis(address, run.config, "coordinator"), *shards):
        try:
            with client:
                keys = list(client.scan_iter(f"{prefix}*", count=_BATCH))
                for first in range(0, len(keys), _BATCH):
                    client.unlink(*keys[first : first + _BATCH])
        except NoPermissionError:
            raise UserError(
                f"Redis does not let this user delete; set STAGECOACH_REDIS_USERNAME and STAGECOACH_REDIS_PASSWORD to "
                f"those of an administrator, or delete the keys {prefix}* yourself and call this again"
            ) from None
