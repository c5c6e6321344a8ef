"""What the page knows of one run: its state now, its curves, its evaluations and events, as plain data for JSON.

From Redis while the run is live, from the store otherwise; where both are away it says so and keeps what it knew.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import redis

from coordinator.catalog.run_metrics import Curves, Recorded
from coordinator.page.panels import PANELS
from coordinator.page.totals import Totals
from coordinator.run import Run
from shared.errors import RedisUnavailable, StagecoachError, StoreError, StoreUnavailable
from shared.protocol.events import read_evaluations
from shared.runtime.failure import reason_in_words
from shared.storage.metric_log import EVALUATIONS, EVENTS, FLEET, TRAIN, UNIX_TIME, VERSION
from trainer_node.metrics.recorder import evaluation_row

_EVENTS_SHOWN = 500
AWAY = (StagecoachError, redis.RedisError, OSError)


class RunView:
    """One run, for any number of readers; `refresh` may be called from one thread at a time."""

    def __init__(self, run: Run, points: int = 1000) -> None:
        self.run, self.banner = run, ""
        self.away: Literal["", "Redis", "store"] = ""
        """Which of both the last refresh did not reach."""
        self.totals = Totals()
        self.curves = {stream: Curves(run.run_id, stream, points) for stream in (TRAIN, FLEET)}
        self._evaluations, self._events = Recorded(EVALUATIONS), Recorded(EVENTS)
        self.evaluations: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.state: dict[str, Any] = {}
        self.checkpoints: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def refresh(self) -> None:
        """Reads what came since; what is away is told as `banner`, and what is known stays."""
        with self._lock:
            try:
                self._refresh()
                self.banner = self.away = ""
            except AWAY as error:
                self.away = _which(error)
                self.banner = f"what is shown is not up to date: {' '.join(str(error).split())}"

    def _refresh(self) -> None:
        run = self.run
        status = run.status()
        self.state = jsonable(status.as_dict())
        self.totals.add(self.state)
        client, store = run.client, run.checkpoint_store().store
        for curves in self.curves.values():
            curves.refresh(store, client)
        for recorded in (self._evaluations, self._events):
            recorded.refresh(store)
        self.checkpoints = [jsonable(entry) for entry in run.checkpoints()]
        scores = dict(self._evaluations.rows)
        if client is not None:
            found = read_evaluations(client, run.run_id)
            scores |= {name: scores.get(name, {}) | evaluation_row(each) for name, each in found.items()}
        self.evaluations = [{"label": name, **row} for name, row in sorted(scores.items(), key=_by_version)]
        self.events = [{"time": row[UNIX_TIME], **_kind_and_text(label)} for label, row in self._events.rows]
        last = max((event["time"] for event in self.events), default=0.0)
        for event in run.events():
            seconds = int(event.id.partition("-")[0]) / 1000
            if seconds > last:
                self.events.append({"time": seconds, "kind": event.kind, "text": event.text})

    def snapshot(self) -> dict[str, Any]:
        """All but the curves."""
        return {
            "run_id": self.run.run_id, "banner": self.banner, "state": self.state,
            "reason": reason_in_words(self.state.get("reason", "")), "evaluations": self.evaluations,
            "events": self.events[-_EVENTS_SHOWN:], "checkpoints": self.checkpoints,
            "metrics": {stream: curves.bins.names for stream, curves in self.curves.items()},
        }  # fmt: skip

    def series(self, stream: str, names: Sequence[str]) -> dict[str, dict[str, list[float]]]:
        """Each metric, or all that begin with a prefix (`time_share/worker/*`); what no row has is left out."""
        bins = self.curves[stream].bins
        wanted = [
            found
            for name in names
            for found in bins.names
            if found == name or (name.endswith("*") and found.startswith(name[:-1]))
        ]
        return {name: bins[name].as_lists() for name in wanted}


def panels() -> list[dict[str, Any]]:
    return [panel.as_dict() for panel in PANELS]


def jsonable(data: Any) -> Any:
    """Without what JSON has no word for."""
    if isinstance(data, Mapping):
        return {str(key): jsonable(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [jsonable(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return None
    return data if data is None or isinstance(data, str | int | float | bool) else str(data)


def _which(error: Exception) -> Literal["", "Redis", "store"]:
    if isinstance(error, RedisUnavailable | redis.RedisError):
        return "Redis"
    return "store" if isinstance(error, StoreUnavailable | StoreError) else ""


def _by_version(item: tuple[str, dict[str, float]]) -> float:
    return item[1][VERSION]


def _kind_and_text(label: str) -> dict[str, str]:
    kind, _, text = label.partition("\t")
    return {"kind": kind, "text": text}
