"""Recorded rows of a run's metrics as tables: their columns, their labels, and CSV. Rows are streamed."""

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TextIO

from stagecoach.shared.storage.metric_log import ENV_STEPS, EVENTS, UNIX_TIME, VERSION, Rows
from stagecoach.trainer_node.metrics.table_files import LABELS


def column_names(parts: Iterable[Rows]) -> list[str]:
    """Lists the names of all metrics; axes come first."""
    found = {name for rows in parts for name in rows.columns}
    return sorted(found, key=lambda name: (name not in (ENV_STEPS, UNIX_TIME, VERSION), name))


def label_columns(stream: str, label: str) -> dict[str, str]:
    """Returns the label columns of a row."""
    if stream == EVENTS:
        kind, text = label.split("\t")[:2]
        return {"kind": kind, "text": text}
    return {LABELS[stream]: label} if stream in LABELS else {}


def named_rows(parts: Iterable[Rows], names: Sequence[str] = ()) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields label and metrics of each row: all metrics, or `names` and the axes."""
    kept = set(_with_axes(names))
    for rows in parts:
        for label, row in rows.named():
            yield label, {name: value for name, value in row.items() if name in kept} if names else row


def write_csv(read: Callable[[], Iterable[Rows]], stream: str, file: TextIO, names: Sequence[str] = ()) -> int:
    """Writes the rows that `read` returns, twice; the columns are the metrics of its first pass. Returns the count."""
    known, count = column_names(read()), 0
    columns = [name for name in _with_axes(names) if name in known] if names else known
    writer = csv.DictWriter(file, [*label_columns(stream, "\t"), *columns], extrasaction="ignore")
    writer.writeheader()
    for label, row in named_rows(read(), names):
        writer.writerow(label_columns(stream, label) | row)
        count += 1
    return count


def _with_axes(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys([ENV_STEPS, UNIX_TIME, *names]))
