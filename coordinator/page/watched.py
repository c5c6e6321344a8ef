"""The views of the runs that somebody looks at, each kept up to date by a thread while it is asked for."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path

from coordinator.catalog.run_files import REMOTE, is_locked, run_paths
from coordinator.catalog.run_list import RunRow, list_runs
from coordinator.page.view import RunView, jsonable
from coordinator.run import Run
from shared.errors import headline

_REFRESH_SECONDS = 1.0
_FORGET_SECONDS = 60.0
_FRESH_SECONDS, _PATIENCE_SECONDS = 2.0, 10.0
_LIST_SECONDS = 1.0
_LOGGER = logging.getLogger("stagecoach.coordinator")


class Watched:
    """A run's view with its newest snapshot as JSON, made once for all who read it."""

    def __init__(self, run: Run) -> None:
        self.view, self.snapshot = RunView(run), ""
        self.wanted = threading.Event()
        """Somebody has asked since the last refresh began."""
        self._refreshed, self._refreshed_at = threading.Condition(), float("-inf")

    @property
    def rows(self) -> dict[str, int]:
        """Rows read of each stream; another number means other curves."""
        return {stream: curves.bins.rows for stream, curves in self.view.curves.items()}

    def refresh(self) -> None:
        self.wanted.clear()
        try:
            self.view.refresh()
        except Exception as error:
            _LOGGER.exception("the view of run %s", self.view.run.run_id)
            self.view.banner = f"what is shown is not up to date: {headline(error)}"
        self.snapshot = json.dumps(jsonable(self.view.snapshot()))
        with self._refreshed:
            self._refreshed_at = time.monotonic()
            self._refreshed.notify_all()

    def wait(self) -> bool:
        """Waits until what is known is a moment old, for some seconds at most; whether anything is known."""
        self.wanted.set()
        with self._refreshed:
            self._refreshed.wait_for(
                lambda: time.monotonic() - self._refreshed_at < _FRESH_SECONDS, timeout=_PATIENCE_SECONDS
            )
        return bool(self.snapshot)


class Views:
    """The runs below `runs_dir`; methods may be called from any thread."""

    def __init__(self, runs_dir: Path) -> None:
        self.runs_dir, self.closed = runs_dir, threading.Event()
        self._watched: dict[str, Watched] = {}
        self._lock, self._list_lock = threading.Lock(), threading.Lock()
        self._listed: tuple[float, list[RunRow]] = (float("-inf"), [])

    def attach(self, run_id: str) -> Run:
        """A handle of its own; raises `RunNotFound`."""
        return Run.attach(run_id, self.runs_dir)

    def of(self, run_id: str) -> Watched:
        """Raises `RunNotFound`; the view may not know anything yet, see `Watched.wait`."""
        with self._lock:
            watched = self._watched.get(run_id)
            if watched is None:
                watched = self._watched[run_id] = Watched(self.attach(run_id))
                name = f"page of {run_id}"
                threading.Thread(target=self._keep, args=(run_id, watched), name=name, daemon=True).start()
            watched.wanted.set()
            return watched

    @property
    def open(self) -> list[str]:
        """The runs that somebody looks at, or has within the last minute."""
        return list(self._watched)

    def live(self) -> list[RunView]:
        """Views of all runs that live here, or may live on other machines."""
        paths = [path for path in run_paths(self.runs_dir) if is_locked(path) or (path / REMOTE).exists()]
        return [watched.view for watched in [self.of(path.name) for path in paths] if watched.wait()]

    def runs(self) -> list[RunRow]:
        with self._list_lock:
            listed_at, rows = self._listed
            if time.monotonic() - listed_at >= _LIST_SECONDS:
                rows = list_runs(self.runs_dir)
                self._listed = time.monotonic(), rows
            return rows

    def close(self) -> None:
        self.closed.set()
        with self._lock:
            for watched in self._watched.values():
                watched.wanted.set()

    def _keep(self, run_id: str, watched: Watched) -> None:
        while not self.closed.is_set():
            if not watched.wanted.wait(_FORGET_SECONDS):
                with self._lock:
                    if not watched.wanted.is_set():
                        del self._watched[run_id]
                        return
            watched.refresh()
            self.closed.wait(_REFRESH_SECONDS)
