"""The newest rows of training metrics, in a short Redis stream for viewers of a live run.

The whole curve is in the store (shared/storage/metric_log.py); a row has the same epoch and number here and there.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import redis
from pydantic import TypeAdapter

from stagecoach.shared.base.printable import foreign
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.scripts import read_stream, write_small

_KEPT = 1000


@dataclass(frozen=True)
class TailRow:
    id: str
    epoch: int
    number: int
    row: dict[str, float | None]
    """Values by metric; None for one that is not finite."""


_ROW = TypeAdapter(TailRow)


def append_row(client: redis.Redis, run_id: str, epoch: int, number: int, row: Mapping[str, float]) -> None:
    keys, shown = RunKeys(run_id), {name: value if math.isfinite(value) else None for name, value in row.items()}
    text = json.dumps({"epoch": epoch, "number": number, "row": shown})
    write_small(client, keys, keys.metrics, "XADD", "MAXLEN", "~", _KEPT, "*", "row", text)


def read_rows(client: redis.Redis, run_id: str, after: str = "0-0") -> list[TailRow]:
    """Returns the rows after an id, oldest first, without malformed rows."""
    return _rows(run_id, read_stream(client, RunKeys(run_id).metrics, after, None, 0.0))


def newest_row(client: redis.Redis, run_id: str) -> dict[str, float | None]:
    found = _rows(run_id, cast(list[Any], client.xrevrange(RunKeys(run_id).metrics, count=1)))
    return found[0].row if found else {}


def _rows(run_id: str, entries: list[Any]) -> list[TailRow]:
    ids = [(id_.decode(), fields.get(b"row", b"")) for id_, fields in entries]
    found = [foreign(_ROW, text, f"the metrics {id_} of run {run_id}", id=id_) for id_, text in ids]
    return [row for row in found if row is not None]
