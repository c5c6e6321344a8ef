"""`stagecoach compare`: differences of two runs' configs and results."""

from typing import TYPE_CHECKING

import typer

from stagecoach.coordinator.cli.terminal.console import console
from stagecoach.coordinator.cli.terminal.options import RUNS, EndpointUrl, Json, Place, RunsDir, attached, example
from stagecoach.shared.base.failure import reason_in_words
from stagecoach.shared.base.printable import figure

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stagecoach.coordinator.run_access.run_comparison import RunResult

app = typer.Typer()


@app.command(epilog=example("stagecoach compare my-run my-other-run"))
def compare(
    run: Place, other: Place, runs_dir: RunsDir = RUNS, endpoint_url: EndpointUrl = None, as_json: Json = False
) -> None:
    """Compare two runs: the fields of their configs that differ, scores, steps, time and throughput."""
    from rich.table import Table

    from stagecoach.coordinator.run_access.run_comparison import config_fields, differences, result_of

    handles = [attached(name, runs_dir, endpoint_url=endpoint_url) for name in (run, other)]
    results = [result_of(handle) for handle in handles]
    changed = differences(*map(config_fields, handles))
    if as_json:
        console.json({"runs": results, "differences": changed})
        return
    ids = [result.run_id for result in results]
    configs = Table("field", *ids, title="config", title_justify="left")
    for name, values in changed.items():
        configs.add_row(name, *(str(value) for value in values))
    console.print(configs if changed else "their configs do not differ")
    table = Table("", *ids, title="result", title_justify="left")
    rated = sorted({name for result in results for name in result.ratings})
    for (title, cell), (_, its) in zip(*(_rows(result, rated) for result in results), strict=True):
        table.add_row(title, cell, its)
    console.print(table)


def _rows(result: "RunResult", rated: "Iterable[str]") -> list[tuple[str, str]]:
    """Title and cell of each row, with a rating for each policy in `rated`."""
    state = f"{result.state}: {reason_in_words(result.reason)}" if result.reason else result.state
    by = f", {result.ranked_by}" if result.ranked_by else ""
    best = f"{figure(result.best)}{by} ({result.best_checkpoint})" if result.best is not None else "–"
    return [
        ("state", state),
        ("training return", figure(result.training_return)),
        ("last evaluation", figure(result.last)),
        ("best (second evaluation)", best),
        ("evaluations", f"{result.evaluations:,}"),
        *((f"rating of {name}", figure(result.ratings.get(name))) for name in rated),
        ("env steps", f"{result.env_steps:,}"),
        ("updates", f"{result.updates:,}"),
        ("time", "–" if result.seconds is None else f"{result.seconds:,.1f} s"),
        ("env steps/s", figure(result.env_steps_per_second)),
    ]
