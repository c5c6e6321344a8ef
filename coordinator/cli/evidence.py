"""`stagecoach evidence`: one folder about a run for a reviewer or a safety case."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagecoach.coordinator.cli.terminal.console import console, progress
from stagecoach.coordinator.cli.terminal.options import Exit, Json, TrustConfig, example, on_run
from stagecoach.shared.base.printable import counted

if TYPE_CHECKING:
    from stagecoach.coordinator.run_access.run import Run

app = typer.Typer()


@app.command(epilog=example("stagecoach evidence my-run reviewed --replay"))
@on_run
def evidence(
    run: "Run",
    directory: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="A new or empty folder; by default RUN-evidence.")
    ] = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="Also train again over the log, and compare (archive=all).")
    ] = False,
    trust_config: TrustConfig = False,
    as_json: Json = False,
) -> None:
    """Write hashes, seeds, versions, drops, ledger and curves of a run into one folder; exit code 1 if any is damaged.

    Its README says what each file shows, and how to verify it.
    """
    from stagecoach.shared.base.user_code import extend_imports

    extend_imports((os.getcwd(), *run.folder.import_path()))
    progress("reading every byte of all checkpoints" + (", and training again" if replay else ""), as_json)
    found = run.evidence(directory or f"{run.run_id}-evidence", replay=replay, trust_config=trust_config)
    if as_json:
        console.json(found.summary)
    else:
        summary = found.summary
        drops = counted(summary["drops"]["fragments"], "dropped fragment")
        what = f"{counted(len(summary['checkpoints']), 'checkpoint')}, {drops}"
        console.text(f"{found.folder}: {summary['state']}; {what}; README.md says how to verify it")
        console.text(*(f"damaged: {name}" for name in found.damaged))
        console.text(*(f"not there: {name}: {why}" for name, why in summary["absent"].items()))
    if found.damaged:
        raise typer.Exit(Exit.FAILED)
