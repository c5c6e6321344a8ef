"""What a program of the contest is told, and how it tells how far it is. Only the standard library: it runs in the
virtual environments of others.

A program is started as `python -m benchmarks.contest.programs.NAME GIVEN`, where GIVEN is a JSON file: `settings` (what
the program is to train, and how), `tell` (the file to tell into) and `cores` (the processors to run on). A line there
is how far it was at one instant, `{"at": …, "env_steps": …, "episodes": …, "mean_return": …}`.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

WINDOW_EPISODES = 100
"""The mean return is that of so many last training episodes unless the settings have another `window`; of fewer there
is none."""
_LEAST_SECONDS = 0.05


class Teller:
    """Appends a line now and then, each in one write."""

    def __init__(self, path: Path, window: int = WINDOW_EPISODES) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._env_steps, self._at, self._window = -1, 0.0, window

    def __call__(self, env_steps: int, episodes: int, mean_return: float | None) -> None:
        """Env steps so far, as the library counts those that it trains on; and the last episodes' mean return."""
        now = time.monotonic()
        if env_steps == self._env_steps or now - self._at < _LEAST_SECONDS:
            return
        self._env_steps, self._at = env_steps, now
        shown = None if mean_return is None or episodes < self._window else float(mean_return)
        self._write({"at": now, "env_steps": int(env_steps), "episodes": int(episodes), "mean_return": shown})

    def end(self, env_steps: int, weights: Iterable[Any]) -> None:
        """Tells the digest of the trained weights, NumPy arrays in an order that is always the same."""
        digest = hashlib.sha256()
        for array in weights:
            digest.update(array.tobytes())
        line = {"at": time.monotonic(), "env_steps": int(env_steps), "episodes": 0, "mean_return": None}
        self._write(line | {"weights": digest.hexdigest()})

    def _write(self, line: dict[str, Any]) -> None:
        os.write(self._file, (json.dumps(line) + "\n").encode())


def given() -> tuple[dict[str, Any], Teller]:
    """The settings, and what to tell with. From here on this process and its children keep to their cores, and SIGTERM
    is what Ctrl-C is, which all of them know how to end on; so is the end of the process that started this one."""
    data = json.loads(Path(sys.argv[1]).read_text())
    os.sched_setaffinity(0, data["cores"])
    signal.signal(signal.SIGTERM, _interrupt)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    settings = data["settings"]
    return settings, Teller(Path(data["tell"]), settings.get("window", WINDOW_EPISODES))


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)
