"""`stagecoach runs`, `note` and `delete`: a run is deleted with its keys in Redis and its objects in the store."""

import contextlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagecoach.coordinator.catalog.run_files import is_all_here
from stagecoach.coordinator.cli.terminal.console import console, progress
from stagecoach.coordinator.cli.terminal.options import RUNS, Exit, Json, RunsDir, example, on_run, run_ids
from stagecoach.coordinator.run_access.run_list import list_runs
from stagecoach.shared.base.errors import DeletionRefused, RunNotFound, UserError
from stagecoach.shared.base.failure import reason_in_words
from stagecoach.shared.base.printable import counted, figure

if TYPE_CHECKING:
    from stagecoach.coordinator.run_access.run import Run
    from stagecoach.shared.config.run_config import Config

app = typer.Typer()
_BATCH = 500


@app.command(epilog=example("stagecoach runs --json"))
def runs(runs_dir: RunsDir = RUNS, as_json: Json = False) -> None:
    """List the runs of this machine."""
    from rich.table import Table

    rows = list_runs(runs_dir)
    table = Table("run", "state", "env steps", "best", "reason")
    for row in rows:
        reason = reason_in_words(row.reason.partition("\n")[0])
        best = f"{figure(row.best)}{f' ({row.ranked_by})' if row.ranked_by else ''}"
        table.add_row(row.run_id, row.state, f"{row.env_steps:,}", best, reason)
    none = f"no runs in {runs_dir.expanduser().resolve()}; start one: stagecoach train cartpole"
    console.json(rows) if as_json else console.print(table if rows else none)


@app.command(epilog=example('stagecoach note my-run "new reward from here on"'))
@on_run
def note(run: "Run", text: Annotated[str, typer.Argument(metavar="TEXT", help="One line.")]) -> None:
    """Write a line into the events of a live run; they are kept with its metrics, and the page shows them."""
    run.note(text)
    console.print(f"{run.run_id}: noted")


@app.command(epilog=example("stagecoach delete my-run --yes"))
def delete(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's id.", autocompletion=run_ids)],
    runs_dir: RunsDir = RUNS,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a run that is not live: its folder, and what it has in Redis and in the store, checkpoints included."""
    _delete(run, runs_dir, ask=not yes)


def former(run_id: str | None, config: "Config") -> Callable[[], None]:
    """Returns the deletion of the run with this id, for `train --force`; raises `UserError` if the new run needs it."""
    if run_id is None:
        raise UserError("--force deletes the run that --run-id names; give that as well")
    if (folder := config.runs_dir.expanduser().resolve() / run_id).exists():
        _check_not_needed(run_id, folder, config)

    def delete() -> None:
        with contextlib.suppress(RunNotFound):
            _delete(run_id, config.runs_dir, ask=False)

    return delete


def _check_not_needed(run_id: str, folder: Path, config: "Config") -> None:
    from stagecoach.shared.config.schema.section import leaves

    sections = {"initialize_from", "policies", "league", "dataset", "demonstrations"}
    for field, value in leaves(config.model_dump(mode="json", include=sections)).items():
        if not value or not field.endswith(("initialize_from", ".source", ".path")):
            continue
        path = Path(value.partition("#")[0]).expanduser()
        named = not field.endswith(".path") and re.split("[/#]", value)[0] == run_id and value != "random"
        if named or path.resolve().is_relative_to(folder) or ("://" in value and path.name == run_id):
            raise UserError(f"--force would delete run {run_id!r}, which {field}={value} needs; take another --run-id")


def _delete(run_id: str, runs_dir: Path, ask: bool) -> None:
    """Deletes one object, then Redis, the store, and the folder last, so that a retry can complete it."""
    from stagecoach.coordinator.catalog.run_folder import RunFolder
    from stagecoach.coordinator.run_access.run import Run
    from stagecoach.coordinator.services.embedded import clear_abandoned_sockets
    from stagecoach.coordinator.services.memory_folder import clear_abandoned_memory

    left = RunFolder.incomplete(run_id, runs_dir)
    if left.path.exists() and not left.live:
        left.remove()
        console.text(f"deleted {left.path}, which a start that was killed had left")
        if not left.path.with_name(run_id).exists():
            return
    folder = RunFolder.find(run_id, runs_dir)
    try:
        run = None if is_all_here(folder.path) else Run.attach(run_id, runs_dir)
    except ValueError as error:
        raise UserError(f"{error}; cannot determine what the run has in Redis and the store") from None
    if run.live if run else folder.live:
        raise UserError(f"run {run_id!r} is live; end it first: stagecoach stop {run_id}")
    what, objects = f"run {run_id}: {folder.path}", list[str]()
    if run:
        objects = run.checkpoint_store().store.keys("")
        what += f", {counted(len(objects), 'object')} in {run.store_location}, its keys in Redis"
    if ask and not sys.stdin.isatty():
        raise UserError(f"this would delete {what}; without a terminal, confirm by --yes")
    if ask and not typer.confirm(f"delete {what}? This cannot be undone"):
        raise typer.Exit(Exit.REFUSED)
    progress(f"deleting {what}")
    with folder.locked():
        if run:
            store = run.checkpoint_store().store
            try:
                for key in objects[:1]:  # before anything else is gone
                    store.delete(key)
            except DeletionRefused as error:
                raise UserError(f"{error}; nothing was deleted") from None
            _forget_keys(run)
            for key in objects:
                store.delete(key)
        clear_abandoned_memory()
        folder.remove()
    clear_abandoned_sockets()
    console.text(f"deleted {what}")


def _forget_keys(run: "Run") -> None:
    from redis.exceptions import NoPermissionError

    from stagecoach.shared.protocol.keys import RunKeys
    from stagecoach.shared.protocol.redis_client import connect_redis, shard_clients

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
