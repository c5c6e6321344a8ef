"""`stagecoach metrics`: all recorded rows of a run as a table, CSV, JSON lines or TensorBoard.

Rows are streamed, so memory is bounded.
"""

import difflib
import io
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from stagecoach.coordinator.cli.terminal.console import console
from stagecoach.coordinator.cli.terminal.options import Json, example, on_run
from stagecoach.shared.base.errors import UserError
from stagecoach.shared.base.printable import counted

if TYPE_CHECKING:
    from stagecoach.coordinator.run_access.run import Run

app = typer.Typer()
_STDOUT = "-"


class Stream(StrEnum):
    """Streams of shared/storage/metric_log.py, without importing NumPy."""

    TRAIN = "train"
    EVALUATIONS = "evaluations"
    EPISODES = "episodes"
    EVENTS = "events"
    FLEET = "fleet"


@app.command(epilog=example("stagecoach metrics s3://bucket/prefix/my-run --csv train.csv"))
@on_run
def metrics(
    run: "Run",
    stream: Annotated[
        Stream, typer.Option(help="Rows of training, of evaluations, of episodes, of the fleet, or of events.")
    ] = Stream.TRAIN,
    metric: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this one; may be repeated.")] = None,
    csv_file: Annotated[
        str | None, typer.Option("--csv", metavar="FILE", help="Write all rows as CSV; -: here.")
    ] = None,
    jsonl_file: Annotated[
        str | None, typer.Option("--jsonl", metavar="FILE", help="Write all rows as JSON lines; -: here.")
    ] = None,
    tensorboard: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write training and evaluations to DIR/RUN, for tensorboard --logdir DIR."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the newest row of a run's metrics, or write all of them: live or ended, from any machine."""
    label, row = run.last_metrics(stream)
    names = list(dict.fromkeys(metric or ()))
    if unknown := [name for name in names if name not in row]:  # perhaps an older row has it
        known = metric_names(run, stream)
        for name in unknown:
            others = [other.value for other in Stream if name in run.last_metrics(other)[1]]
            hint = f" (it is in --stream {others[0]})" if others else ""
            check_metrics(run.run_id, name, known, f"in its stream {stream.value}{hint}")
    if not row:
        hint = "; `metrics.episodes: true` records them" if stream is Stream.EPISODES else ""
        raise UserError(f"run {run.run_id!r} has no rows in the stream {stream.value}{hint}")
    if csv_file is not None:
        _write(csv_file, lambda file: _write_csv(run, stream, names, file))
    if jsonl_file is not None:
        _write(jsonl_file, lambda file: _write_jsonl(run, stream, names, file))
    if tensorboard is not None:
        _write_tensorboard(run, names, tensorboard)
    if csv_file is None and jsonl_file is None and tensorboard is None:
        shown = {name: row.get(name) for name in names or sorted(row)}
        from stagecoach.coordinator.catalog.metric_tables import label_columns

        labels = label_columns(stream, label)
        console.json(labels | shown) if as_json else _print_row(run.run_id, labels, shown)


def metric_names(handle: "Run", stream: str) -> list[str]:
    """Names of all metrics of a stream; axes come first."""
    from stagecoach.coordinator.catalog.metric_tables import column_names

    return column_names(handle.metrics(stream))


def check_metrics(run_id: str, name: str, known: Sequence[str], where: str) -> None:
    """Raises `UserError` with similar names for an unknown metric."""
    if name not in known:
        similar = [other for other in known if name in other] + difflib.get_close_matches(name, known, 3, 0.5)
        hint = " or ".join(list(dict.fromkeys(similar))[:3])
        hint = f"did you mean {hint}?" if hint else f"it has {counted(len(known), 'other')}"
        raise UserError(f"run {run_id!r} has no {name!r} {where}; {hint}")


def _print_row(run_id: str, labels: dict[str, str], row: dict[str, float | None]) -> None:
    from rich.table import Table

    table = Table("metric", "newest", title=run_id, title_justify="left")
    for name, text in labels.items():
        table.add_row(name, text)
    for name, value in row.items():
        integral = value is not None and (not value % 1 or abs(value) >= 1e6)
        table.add_row(name, "–" if value is None else f"{value:,.0f}" if integral else f"{value:.6g}")
    console.print(table)


def _write(path: str, write: Callable[[TextIO], int]) -> None:
    """Writes atomically to a file, or to standard output, whose reader may stop early."""
    from stagecoach.shared.base.local_disk import replacing

    if path == _STDOUT:
        try:
            write(sys.stdout)
            sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at exit
        return
    try:
        with replacing(Path(path)) as file:
            text = io.TextIOWrapper(file, "utf-8", newline="")
            count = write(text)
            text.detach()
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
    console.text(f"{path}: {counted(count, 'row')}")


def _write_csv(handle: "Run", stream: Stream, names: Sequence[str], file: TextIO) -> int:
    from stagecoach.coordinator.catalog.metric_tables import write_csv

    return write_csv(lambda: handle.metrics(stream), stream, file, names)


def _write_jsonl(handle: "Run", stream: Stream, names: Sequence[str], file: TextIO) -> int:
    from stagecoach.coordinator.catalog.metric_tables import label_columns, named_rows

    count = 0
    for label, row in named_rows(handle.metrics(stream), names):
        finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
        file.write(json.dumps(label_columns(stream, label) | finite) + "\n")
        count += 1
    return count


def _write_tensorboard(handle: "Run", names: Sequence[str], folder: Path) -> None:
    from stagecoach.coordinator.catalog.metric_tables import named_rows
    from stagecoach.shared.storage.metric_log import ENV_STEPS
    from stagecoach.trainer_node.metrics.tensorboard_writer import TensorBoardWriter
    from stagecoach.trainer_node.metrics.writers import WrittenRun

    count = 0
    try:
        config = handle.config.model_dump(mode="json")
        writer = TensorBoardWriter(WrittenRun(handle.run_id, None, config), str(folder / handle.run_id))
        for stream in (Stream.TRAIN, Stream.EVALUATIONS):
            for _, row in named_rows(handle.metrics(stream), names):
                writer.write(stream, row, int(row[ENV_STEPS]), "")
                count += 1
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror or error}") from None
    console.text(f"{folder / handle.run_id}: {counted(count, 'row')}; look at them: tensorboard --logdir {folder}")
