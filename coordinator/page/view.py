"""The page's view of a run: state, curves, evaluations and events, as plain data for JSON.

Read from Redis while the run is live, else from the store. During an outage a view keeps its last data, with a banner.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import redis
from pydantic_core import to_jsonable_python

from stagecoach.coordinator.catalog.run_files import REMOTE, is_locked, run_paths
from stagecoach.coordinator.catalog.run_metrics import Curves, Recorded
from stagecoach.coordinator.page.totals import Totals
from stagecoach.coordinator.run_access.run import Run
from stagecoach.shared.base import world
from stagecoach.shared.base.errors import RedisUnavailable, StagecoachError, StoreError, StoreUnavailable, headline
from stagecoach.shared.base.failure import reason_in_words
from stagecoach.shared.protocol.events import read_evaluations
from stagecoach.shared.storage.metric_log import EVALUATIONS, FLEET, TRAIN, VERSION
from stagecoach.trainer_node.metrics.recorder import evaluation_row

_EVENTS_SHOWN = 500
_FRESH_SECONDS, _PATIENCE_SECONDS = 2.0, 10.0
_SCRAPE_SECONDS = 3.0
"""Time that a scrape waits for all runs together; Prometheus gives up after 10 s by default."""
_REFRESH_SECONDS, _FORGET_SECONDS = 1.0, 60.0
_LOGGER = logging.getLogger("stagecoach.coordinator")
AWAY = (StagecoachError, redis.RedisError, OSError)


class RunView:
    """View of one run for any number of readers; one thread calls `update`."""

    def __init__(self, run: Run) -> None:
        self.run, self.banner = run, ""
        self.away: Literal["", "Redis", "store"] = ""
        """Service that the last refresh could not reach."""
        self.totals = Totals()
        self.curves = {stream: Curves(run.run_id, stream) for stream in (TRAIN, FLEET)}
        self._evaluations, self._last_event = Recorded(EVALUATIONS), "0-0"
        self.evaluations: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.state: dict[str, Any] = {}
        self.checkpoints: list[dict[str, Any]] = []
        self.snapshot_json = ""
        """Newest `snapshot` as JSON, encoded once for all readers."""
        self.wanted = world.Event()
        """Set when a reader asks for an update."""
        self._updated, self._updated_at = world.Condition(), float("-inf")

    def update(self) -> None:
        """Refreshes and wakes waiting readers; never raises."""
        self.wanted.clear()
        try:
            self.refresh()
        except Exception as error:
            _LOGGER.exception("the view of run %s", self.run.run_id)
            self.banner = f"not up to date: {headline(error)}"
        self.snapshot_json = json.dumps(jsonable(self.snapshot()))
        with self._updated:
            self._updated_at = world.monotonic()
            self._updated.notify_all()

    def wait(self, seconds: float = _PATIENCE_SECONDS) -> bool:
        """Waits for fresh data, at most `seconds`; returns whether there is any data."""
        self.wanted.set()
        with self._updated:
            fresh = lambda: world.monotonic() - self._updated_at < _FRESH_SECONDS  # noqa: E731
            self._updated.wait_for(fresh, timeout=max(0.0, seconds))
        return bool(self.snapshot_json)

    @property
    def rows(self) -> dict[str, int]:
        """Rows read of each stream; a new number means new curves."""
        return {stream: curves.bins.rows for stream, curves in self.curves.items()}

    def refresh(self) -> None:
        """Reads new data; an outage sets `banner` and keeps the old data."""
        try:
            self._refresh()
            self.banner = self.away = ""
        except AWAY as error:
            self.away = away(error)
            self.banner = f"not up to date: {' '.join(str(error).split())}"

    def _refresh(self) -> None:
        run = self.run
        status = run.status()
        self.state = jsonable(status.as_dict())
        self.totals.add(self.state)
        client, store = run.client, run.checkpoint_store().store
        for curves in self.curves.values():
            curves.refresh(store, client)
        due = self._evaluations.refresh(store)
        self.checkpoints = [jsonable(entry) for entry in run.checkpoints()]
        scores = dict(self._evaluations.rows)
        if client is not None:
            found = read_evaluations(client, run.run_id)
            scores |= {name: scores.get(name, {}) | evaluation_row(each) for name, each in found.items()}
        in_order = sorted(scores.items(), key=lambda item: item[1][VERSION])
        self.evaluations = [{"label": name, **row} for name, row in in_order]
        for event in run.events(self._last_event) if client is not None or due else ():
            self._last_event = event.id
            self.events.append({"time": event.unix_seconds, "kind": event.kind, "text": event.text})

    def snapshot(self) -> dict[str, Any]:
        """Everything but the curves."""
        return {
            "run_id": self.run.run_id, "banner": self.banner, "state": self.state,
            "reason": reason_in_words(self.state.get("reason", "")), "evaluations": self.evaluations,
            "events": self.events[-_EVENTS_SHOWN:], "checkpoints": self.checkpoints,
            "metrics": {stream: curves.bins.names for stream, curves in self.curves.items()},
        }  # fmt: skip

    def series(self, stream: str, names: Sequence[str]) -> dict[str, dict[str, list[float]]]:
        """Series by metric or prefix (`time_share/worker/*`); unknown metrics are left out."""
        bins = self.curves[stream].bins
        return {found: bins[found].as_lists() for name in names for found in matching(name, bins.names)}


class Views:
    """Views of the runs in `runs_dir`. A thread keeps each up to date while readers ask for it. Thread-safe."""

    def __init__(self, runs_dir: Path) -> None:
        self.runs_dir, self.closed = runs_dir, world.Event()
        self._watched: dict[str, RunView] = {}
        self._lock = world.Lock()

    def attach(self, run_id: str) -> Run:
        """Creates a new handle; raises `RunNotFound`."""
        return Run.attach(run_id, self.runs_dir)

    def of(self, run_id: str) -> RunView:
        """Returns the view, which may still be empty (`RunView.wait`); raises `RunNotFound`."""
        with self._lock:
            view = self._watched.get(run_id)
            if view is None:
                view = self._watched[run_id] = RunView(self.attach(run_id))
                name = f"page of {run_id}"
                world.Thread(target=self._keep, args=(run_id, view), name=name, daemon=True).start()
            view.wanted.set()
            return view

    def live(self) -> list[RunView]:
        """Views of all runs that are live here, or may be live elsewhere. One whose Redis is silent keeps old data, and
        does not delay the others."""
        paths = [path for path in run_paths(self.runs_dir) if is_locked(path) or (path / REMOTE).exists()]
        views, until = [self.of(path.name) for path in paths], world.monotonic() + _SCRAPE_SECONDS
        return [view for view in views if view.wait(until - world.monotonic())]

    def close(self) -> None:
        self.closed.set()
        with self._lock:
            for view in self._watched.values():
                view.wanted.set()

    def _keep(self, run_id: str, view: RunView) -> None:
        while not self.closed.is_set():
            if not view.wanted.wait(_FORGET_SECONDS):
                with self._lock:
                    if not view.wanted.is_set():
                        del self._watched[run_id]
                        return
            view.update()
            self.closed.wait(_REFRESH_SECONDS)


def matching(name: str, there: Sequence[str]) -> list[str]:
    """Metrics with this name, or with this prefix if it ends in `*`."""
    return [found for found in there if found == name or (name.endswith("*") and found.startswith(name[:-1]))]


def jsonable(data: Any) -> Any:
    """Converts to JSON types; NaN and infinities become null."""
    return to_jsonable_python(data, inf_nan_mode="null", fallback=str)


def away(error: Exception) -> Literal["", "Redis", "store"]:
    """Names the service that an error says is unreachable."""
    if isinstance(error, RedisUnavailable | redis.RedisError):
        return "Redis"
    return "store" if isinstance(error, StoreUnavailable | StoreError) else ""
