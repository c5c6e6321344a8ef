"""`stagecoach tune`: hyperparameter search over runs, which any interruption leaves as it was."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagecoach.coordinator.cli.terminal.console import NARROW, PrintableConsole, console, progress
from stagecoach.coordinator.cli.terminal.options import Exit, Json, example
from stagecoach.shared.base.printable import complain, figure
from stagecoach.shared.base.process import interruptible

if TYPE_CHECKING:
    from stagecoach.coordinator.studies.study import Study
    from stagecoach.coordinator.studies.trial_record import Trial

app = typer.Typer()


@app.command(epilog=example("stagecoach tune study.yaml --parallel 2"))
def tune(
    study: Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="What to vary, and how a trial is scored.")],
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the study; by default the file's.")] = None,
    runs_dir: Annotated[Path | None, typer.Option(help="Folder of this machine's runs (the config's).")] = None,
    parallel: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="So many runs at a time, instead of the study's.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Draw Optuna's plots there, with matplotlib.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Search hyperparameters with Optuna; each trial is a run. The same command continues an interrupted study."""
    progress("loading PyTorch and Optuna", as_json)
    with interruptible():
        from stagecoach.coordinator.studies.study import StudyInterrupted
        from stagecoach.coordinator.studies.study import tune as search

    told = PrintableConsole(stderr=True) if as_json else console
    try:
        found = search(study, name=name, runs_dir=runs_dir, parallel=parallel, report=told.text)
    except StudyInterrupted as error:
        complain(error)
        raise typer.Exit(Exit.INTERRUPTED) from None
    plots = found.plot(plot) if plot is not None else []
    if as_json:
        console.json(_as_json(found, plots))
    else:
        _print_table(found, plots)


def _as_json(study: "Study", plots: list[Path]) -> dict[str, object]:
    return {
        "study": study.name, "exact": study.config.exact, "objective": study.config.objective.model_dump(mode="json"),
        "best": study.best.model_dump(mode="json"), "best_config": str(study.best_path),
        "trials": [trial.model_dump(mode="json") for trial in study.trials], "plots": [str(path) for path in plots],
    }  # fmt: skip


def _print_table(study: "Study", plots: list[Path]) -> None:
    from rich.table import Column, Table

    fields = sorted(study.config.space)
    names = [field.rpartition(".")[2] for field in fields]
    titles = [name if names.count(name) == 1 else field for name, field in zip(names, fields, strict=True)]
    born = ["parent"] if study.config.population is not None else []
    table = Table("trial", *born, *(Column(title, overflow="fold") for title in titles), "score", "state", **NARROW)
    for trial in study.trials:
        marked = " *" if trial.number == study.best.number else ""
        shown = [_shown(trial.parameters[field]) for field in fields]
        if born:
            shown.insert(0, _parent(trial))
        table.add_row(f"{trial.number:04}", *shown, f"{figure(trial.score)}{marked}", _state(trial))
    console.print(table)
    states = Counter(trial.state for trial in study.trials)
    counts = ", ".join(f"{states[state]} {state}" for state in ("complete", "pruned", "failed") if states[state])
    exact = "" if study.config.exact else "; not exact: it depends on the clock"
    console.text(
        f"{counts}; score: {study.config.objective.measure}{exact}",
        f"best: trial {study.best.number:04} with {figure(study.best.score)}; stagecoach train {study.best_path}",
        *([f"its policy: stagecoach evaluate {study.name}-{study.best.number:04}/final"] if born else []),
        *(f"plot: {path}" for path in plots),
    )


def _parent(trial: "Trial") -> str:
    return "–" if trial.parent is None else f"{trial.parent:04}{' (copy)' if trial.copied else ''}"


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _state(trial: "Trial") -> str:
    return trial.state if trial.error is None else f"failed: {trial.error}"
