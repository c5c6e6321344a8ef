"""`stagecoach profile` and `stagecoach bench`: where a run's time went, and what this machine can do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli_options import RUNS, Json, RunArgument, RunsDir, console, example, print_json
from shared.errors import UserError

if TYPE_CHECKING:
    from coordinator.run import Run

app = typer.Typer()
_CHECKOUT = Path(__file__).parent.parent


@app.command(epilog=example("stagecoach profile my-run --out timeline.json"))
def profile(
    run: RunArgument,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The timeline; profile.json in the run's folder by default.")
    ] = None,
    runs_dir: RunsDir = RUNS,
    as_json: Json = False,
) -> None:
    """Show where the time of a run with `--profile` went, and write the timeline for Perfetto or speedscope."""
    from coordinator.run import Run

    show_profile(Run.attach(run, runs_dir), out, as_json)


def show_profile(run: Run, out: Path | None = None, as_json: bool = False) -> None:
    """The table, and the timeline into a file; raises `UserError` where the run has left none."""
    from coordinator.profiles import TRACE, RunProfile, stages_table

    found = RunProfile.read(run.checkpoint_store())
    path = out or run.folder.path / TRACE
    found.write(path)
    if as_json:
        print_json(found.as_dict() | {"timeline": str(path)})
        return
    console.print(stages_table(found.seconds))
    console.print(f"timeline (ui.perfetto.dev, speedscope.app): {path}", highlight=False, soft_wrap=True)


@app.command(
    epilog=example("stagecoach bench transport --repeats 5"), context_settings={"ignore_unknown_options": True}
)
def bench(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME …] [OPTIONS]", help="Which ones; `python -m benchmarks --help` tells."),
    ] = None,
) -> None:
    """Measure what is fast and what is not, in a source checkout; all benchmarks, or those that are named."""
    if not (_CHECKOUT / "benchmarks" / "kit").is_dir():
        raise UserError(
            "the benchmarks are part of the source checkout, not of the installed package; clone the repository, and "
            "run `make bench` there"
        )
    done = subprocess.run([sys.executable, "-m", "benchmarks", *(arguments or ())], cwd=_CHECKOUT)
    raise typer.Exit(done.returncode)
