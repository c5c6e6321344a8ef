"""The views of the runs that somebody looks at, each kept up to date by a thread while it is asked for."""

import threading
import time
from pathlib import Path

from coordinator.catalog.run_files import REMOTE, is_locked, run_paths
from coordinator.catalog.run_list import RunRow, list_runs
from coordinator.page.view import RunView
from coordinator.run import Run

_REFRESH_SECONDS = 1.0
_FORGET_SECONDS = 60.0
_LIST_SECONDS = 1.0


class Views:
    """The runs below `runs_dir`; methods may be called from any thread."""

    def __init__(self, runs_dir: Path) -> None:
        self.runs_dir, self.closed = runs_dir, threading.Event()
        self._watched: dict[str, RunView] = {}
        self._lock, self._list_lock = threading.Lock(), threading.Lock()
        self._listed: tuple[float, list[RunRow]] = (float("-inf"), [])

    def attach(self, run_id: str) -> Run:
        """A handle of its own; raises `RunNotFound`."""
        return Run.attach(run_id, self.runs_dir)

    def of(self, run_id: str) -> RunView:
        """Raises `RunNotFound`; the view may not know anything yet, see `RunView.wait`."""
        with self._lock:
            view = self._watched.get(run_id)
            if view is None:
                view = self._watched[run_id] = RunView(self.attach(run_id))
                name = f"page of {run_id}"
                threading.Thread(target=self._keep, args=(run_id, view), name=name, daemon=True).start()
            view.wanted.set()
            return view

    def live(self) -> list[RunView]:
        """Views of all runs that live here, or may live on other machines."""
        paths = [path for path in run_paths(self.runs_dir) if is_locked(path) or (path / REMOTE).exists()]
        return [view for view in [self.of(path.name) for path in paths] if view.wait()]

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
