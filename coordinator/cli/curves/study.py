"""`stagecoach study`: results of runs, and of their configs over seeds with intervals."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagecoach.coordinator.cli.terminal.console import NARROW, console
from stagecoach.coordinator.cli.terminal.options import RUNS, EndpointUrl, Json, RunsDir, attached, example
from stagecoach.shared.base.failure import reason_in_words
from stagecoach.shared.base.printable import figure

if TYPE_CHECKING:
    from stagecoach.coordinator.run_access.run import Run
    from stagecoach.coordinator.run_access.run_comparison import ConfigResult, RunResult

app = typer.Typer()


class Score(StrEnum):
    last = "last"
    best = "best"
    training = "training"


@app.command(epilog=example("stagecoach study base-seed-1 base-seed-2 long-seed-1 long-seed-2"))
def study(
    runs: Annotated[list[str], typer.Argument(metavar="RUN…", help="Runs, as for the other commands.")],
    score: Annotated[
        Score, typer.Option(help="What is compared: last evaluation, best (by a second evaluation), training return.")
    ] = Score.last,
    runs_dir: RunsDir = RUNS, endpoint_url: EndpointUrl = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Compare runs: results, the fields that differ, and configs over their seeds, with 95 % intervals."""
    from stagecoach.coordinator.run_access.run_comparison import result_of

    handles = [attached(name, runs_dir, endpoint_url=endpoint_url) for name in dict.fromkeys(runs)]
    show_study({run: result_of(run) for run in handles}, score, as_json)


def show_study(runs: "Mapping[Run, RunResult]", score: Score = Score.last, as_json: bool = False) -> None:
    from stagecoach.coordinator.run_access.run_comparison import differing_fields, groups_by_seed, results_by_config

    groups = groups_by_seed([*runs])
    field = "training_return" if score is Score.training else score.value
    configs = results_by_config([[runs[run] for run in group] for group in groups], field)
    changed = differing_fields(groups)
    if as_json:
        console.json({"runs": list(runs.values()), "differences": changed, "score": field, "configs": configs})
        return
    if changed:
        _print_differences(changed, [its.name for its in configs])
    _print_runs(list(runs.values()))
    if len(runs) > 1:
        _print_configs(configs, field)


def _print_differences(changed: Mapping[str, Sequence[Any]], names: Sequence[str]) -> None:
    from rich.table import Column, Table

    table = Table("field", *(Column(name, overflow="fold") for name in names), **NARROW)
    for field, values in changed.items():
        table.add_row(field, *(str(value) for value in values))
    console.print(table)


def _print_runs(results: "Sequence[RunResult]") -> None:
    from rich.table import Column, Table

    from stagecoach.coordinator.run_access.run_comparison import SCORES

    rated = sorted({name for result in results for name in result.ratings})
    columns = "state", "env steps", "steps/s", *SCORES.values(), *(f"rating of {name}" for name in rated)
    table = Table(Column("run", overflow="fold"), *columns, **NARROW)
    for its in results:
        state = reason_in_words(its.reason.partition("\n")[0]) or its.state
        scores = [figure(getattr(its, field)) for field in SCORES]
        ratings = [figure(its.ratings.get(name)) for name in rated]
        speed = figure(its.env_steps_per_second)
        table.add_row(its.run_id, state, f"{its.env_steps:,}", speed, *scores, *ratings)
    console.print(table)
    if told := " and ".join(sorted({its.ranked_by for its in results} - {""})):
        console.text(f"best is by {told}; last evaluation is the return of all agents together")


def _print_configs(configs: "Sequence[ConfigResult]", field: str) -> None:
    from rich.table import Column, Table

    from stagecoach.coordinator.run_access.run_comparison import SCORES

    improved = [f"P(above {configs[0].name})"] if len(configs) > 1 else []
    table = Table(Column("config", overflow="fold"), "seeds", "mean", "IQM", *improved, **NARROW)
    for its in configs:
        chances = [_cell(its.improvement, its.improvement_interval)] if improved else []
        mean, middle = _cell(its.mean, its.mean_interval), _cell(its.iqm, its.iqm_interval)
        table.add_row(its.name, str(its.seeds), mean, middle, *chances)
    console.print(table)
    console.text(f"score: {SCORES[field]}; in brackets 95 % intervals (mean: Student's t, else bootstrap over seeds)")


def _cell(value: float | None, bounds: tuple[float, float] | None) -> str:
    return figure(value) + (f" [{figure(bounds[0])}, {figure(bounds[1])}]" if bounds else "")
