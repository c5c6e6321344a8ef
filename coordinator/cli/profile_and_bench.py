"""`stagecoach profile` and `stagecoach bench`: where a run's time went, and what this machine can do."""

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from stagecoach.coordinator.cli.terminal.console import console
from stagecoach.coordinator.cli.terminal.options import Json, example, on_run
from stagecoach.shared.base.code_version import SOURCE
from stagecoach.shared.base.errors import UserError

if TYPE_CHECKING:
    from stagecoach.coordinator.run_access.run import Run
    from stagecoach.shared.storage.checkpoint_store import CheckpointStore

app = typer.Typer()


@app.command(epilog=example("stagecoach profile my-run --out timeline.json"))
@on_run
def profile(
    run: "Run",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The timeline; profile.json in the run's folder by default.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show where the time of a run with `--profile` went, and write the timeline for Perfetto or speedscope."""
    show_profile(run, out, as_json)


def show_profile(run: "Run", out: Path | None = None, as_json: bool = False) -> None:
    """The table, and the timeline into a file; raises `UserError` where the run has left none."""
    events, seconds = read_profile(run.checkpoint_store())
    path = out or run.folder.path / "profile.json"
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    if as_json:
        console.json({"seconds": seconds, "timeline": str(path)})
        return
    console.print(_stages_table(seconds))
    console.text(f"timeline (ui.perfetto.dev, speedscope.app): {path}")


def read_profile(checkpoints: "CheckpointStore") -> tuple[list[dict[str, Any]], dict[str, dict[str, float]]]:
    """Timeline events of all processes that ended cleanly, and their seconds by `process / thread` and stage.

    Sums several processes of one role. Raises `UserError` for a missing or unreadable profile.
    """
    from stagecoach.shared.runtime.profile import FOLDER

    run_id = checkpoints.run_id
    events: list[dict[str, Any]] = []
    seconds: dict[str, dict[str, float]] = {}
    for key in sorted(checkpoints.store.keys(f"{FOLDER}/"), key=lambda key: ("trainer" not in key, key)):
        try:
            found = checkpoints.read_whole(key, json.loads)
        except ValueError:
            raise UserError(f"{key} of run {run_id!r} was cut off; without it the others can be read") from None
        events += found["traceEvents"]
        for thread, stages in found["otherData"]["seconds"].items():
            line = seconds.setdefault(f"{found['otherData']['name']} / {thread}", {})
            for stage, spent in stages.items():
                line[stage] = line.get(stage, 0.0) + spent
    if not events:
        raise UserError(
            f"run {run_id!r} has left no profile: start it with `stagecoach train --profile` (metrics.profile); "
            f"each process writes its own when it ends"
        )
    return events, seconds


def _stages_table(seconds: dict[str, dict[str, float]]) -> Table:
    """A row for each stage of each thread, the longest first, with its share of that thread's time."""
    table = Table("process / thread", "stage", title="where the time went", title_justify="left")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    for thread, stages in seconds.items():
        total = sum(stages.values()) or 1.0
        name = thread
        for stage, spent in sorted(stages.items(), key=lambda item: -item[1]):
            if spent >= 0.0005:
                table.add_row(name, stage, f"{spent:,.3f}", f"{spent / total:.1%}")
                name = ""
        table.add_section()
    return table


@app.command(
    epilog=example("stagecoach bench transport --repeats 5"), context_settings={"ignore_unknown_options": True}
)
def bench(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME …] [OPTIONS]", help="Benchmarks to run; see `python -m benchmarks --help`."),
    ] = None,
) -> None:
    """Measure what is fast and what is not, in a source checkout; all benchmarks, or those that are named."""
    if not (SOURCE / "benchmarks" / "kit").is_dir():
        raise UserError(
            "the benchmarks are part of the source checkout, not of the installed package; clone the repository, and "
            "run `make bench` there"
        )
    done = subprocess.run([sys.executable, "-m", "benchmarks", *(arguments or ())], cwd=SOURCE)
    raise typer.Exit(done.returncode)
