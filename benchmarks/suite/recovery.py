"""How long a run takes to be back after `kill -9` of its trainer or of a worker.

The clock runs from the kill until the work continues: for the trainer until a version that was not there before is
published, for a worker until its successor has pushed a fragment. So all is in it: that Ray notices, a new process, its
imports, the connections, the newest checkpoint and the log behind it.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.kit.measure import Measure, Result
from benchmarks.kit.options import Options
from stagecoach.coordinator.run_access.run import Run
from stagecoach.shared.config.loading import parse_config

_POLL_SECONDS = 0.05
_PAUSE_SECONDS = 2.0
"""Between two kills, so that each finds a run at work."""
_KILLS = 4
"""Of each kind in a repeat."""
_AIMS = {"trainer": 1.5, "worker-0": 1.0}
"""Seconds, for p50 and p95 alike."""
_BACK_SECONDS = 120.0


def measure(options: Options) -> Result:
    """One run, all of whose kills it survives; the accounting is checked when it has ended."""
    kills = 1 if options.quick else _KILLS
    found: dict[str, list[list[float]]] = {role: [] for role in _AIMS if options.wants(role)}
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
        run = start(Path(folder))
        try:
            for repeat in range(options.repeats):
                for role, rounds in found.items():
                    rounds.append([_killed(run, role) for _ in range(kills)])
                    options.tell(f"round {repeat + 1}: {role}: {', '.join(f'{s:.2f}' for s in rounds[-1])} s")
            run.stop()
            balances = run.wait(_BACK_SECONDS).status.ledger["total"]["balances"]
        finally:
            run.abandon()
            run.wait(60)
    measures = [line for role, rounds in found.items() for line in _lines(role, rounds)]
    remarks = [
        f"{role}: {len(all_)} kills, p95 of all of them {_p95(all_):.2f} s, the longest {max(all_):.2f} s"
        for role, rounds in found.items()
        for all_ in [[seconds for kills_ in rounds for seconds in kills_]]
    ]
    remarks.append(f"the ledger {'balances' if balances else 'DOES NOT BALANCE'} after all kills")
    sections = {name: section for name, section in _sections(Path()).items() if name != "runs_dir"}
    settings = sections | {"kills of each kind in a repeat": kills, "pause (s)": _PAUSE_SECONDS}
    return Result("recovery", __doc__ or "", measures, settings, remarks=remarks)


def start(folder: Path) -> Run:
    """CartPole with two workers and no end."""
    run = Run.start(parse_config(_sections(folder)), "recovery")
    _until(lambda: run.status().version > 20)
    return run


def _sections(folder: Path) -> dict[str, Any]:
    return {
        "environment": {"id": "CartPole-v1"},
        "runs_dir": str(folder),
        "rollout": {"workers": 2, "restarts_allowed": 10**6},
        "checkpoint": {"every": "10 updates"},
        "evaluation": {"episodes": 2},
        "stop_at": {"updates": 10**9},
    }


def _killed(run: Run, role: str) -> float:
    """SIGKILL, a while after the last one; the seconds until it is made good."""
    time.sleep(_PAUSE_SECONDS)
    pid = next(beat.pid for beat in run.status().roles if beat.id == role)
    os.kill(pid, signal.SIGKILL)
    version, fragments = run.status().version, _pushed(run, role)
    if role == "trainer":
        return _until(lambda: run.status(accounting=False).version > version)
    return _until(lambda: _pushed(run, role) > fragments)


def _until(done: Callable[[], bool]) -> float:
    """Looks often, but not so often that it takes the processor away; answers the seconds."""
    started = time.monotonic()
    while not done():
        time.sleep(_POLL_SECONDS)
        if time.monotonic() - started > _BACK_SECONDS:
            raise RuntimeError(f"the run does not go on within {_BACK_SECONDS:g} s")
    return time.monotonic() - started


def _pushed(run: Run, worker: str) -> int:
    """Fragments of a worker so far."""
    line = run.status().ledger.get(worker)
    return int(line["produced"]["fragments"]) if line else 0


def _lines(role: str, rounds: list[list[float]]) -> list[Measure]:
    aim = _AIMS[role]
    return [
        Measure(f"{role}, p50", "s", [statistics.median(kills) for kills in rounds], aim=aim, better="less"),
        Measure(f"{role}, p95", "s", [_p95(kills) for kills in rounds], aim=aim, better="less"),
    ]


def _p95(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=20, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]
