"""How long a run takes to be back after `kill -9`: `python -m benchmarks.recovery --kills 10`.

The clock runs from the kill until the work goes on: for the trainer until a version that was not there before is
published, for a worker until its successor has pushed a fragment. So all is in it: that Ray notices, a new process, its
imports, the connections, the newest checkpoint and the log behind it.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from coordinator.run import Run
from shared.config_sources import parse_config

_LOOK_SECONDS = 0.05
_PAUSE_SECONDS = 3.0
"""Between two kills, so that each finds a run at work."""


def start(folder: Path) -> Run:
    """CartPole with two workers and no end."""
    config = {
        "environment": {"id": "CartPole-v1"},
        "runs_dir": str(folder),
        "rollout": {"workers": 2, "restarts_allowed": 10**6},
        "checkpoint": {"every": "10 updates"},
        "evaluation": {"episodes": 2},
        "stop_at": {"updates": 10**9},
    }
    run = Run.start(parse_config(config), "recovery")
    until(lambda: run.status().version > 20)
    return run


def until(done: Callable[[], bool]) -> float:
    """Looks often, but not so often that it takes the processor away; answers the seconds."""
    started = time.monotonic()
    while not done():
        time.sleep(_LOOK_SECONDS)
        assert time.monotonic() - started < 120, "it does not come back"
    return time.monotonic() - started


def pushed(run: Run, worker: str) -> int:
    """Fragments of a worker so far."""
    line = run.status().ledger.get(worker)
    return int(line["produced"]["fragments"]) if line else 0


def kill(run: Run, role: str) -> float:
    """SIGKILL; the seconds until it is made good."""
    pid = next(beat.pid for beat in run.status().roles if beat.id == role)
    os.kill(pid, signal.SIGKILL)
    version, fragments = run.status().version, pushed(run, role)
    if role == "trainer":
        return until(lambda: run.status(books=False).version > version)
    return until(lambda: pushed(run, role) > fragments)


def main() -> None:
    """Prints a table: what was killed, how often, p50, p95 and the longest, in seconds."""
    parser = argparse.ArgumentParser(description="Times the recovery of a run on this machine.")
    parser.add_argument("--kills", type=int, default=10, help="of each kind")
    kills = parser.parse_args().kills
    with tempfile.TemporaryDirectory() as folder:
        run = start(Path(folder))
        try:
            print(f"{'killed':<10} {'n':>4} {'p50':>6} {'p95':>6} {'most':>6}   seconds; load {os.getloadavg()[0]:.1f}")
            for role in ("trainer", "worker-0"):
                seconds = []
                for _ in range(kills):
                    time.sleep(_PAUSE_SECONDS)
                    seconds.append(kill(run, role))
                p95 = statistics.quantiles(seconds, n=20, method="inclusive")[-1]
                row = f"{statistics.median(seconds):>6.2f} {p95:>6.2f} {max(seconds):>6.2f}"
                print(f"{role:<10} {kills:>4} {row}", flush=True)
            run.stop()
            print(f"ledger balances: {run.wait(120).status.ledger['total']['balances']}")
        finally:
            run.abandon()
            run.wait(60)


if __name__ == "__main__":
    main()
