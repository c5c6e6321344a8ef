"""How long `stagecoach train` takes to the first update, what the time goes to, and how long a run takes to end.

Ray's own start is shown apart. The end runs from the last update, the one that reaches `stop_at`, to the end of the
command: the last checkpoint, and all processes gone.
"""

from __future__ import annotations

import contextlib
import datetime
import re
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import redis

from benchmarks.kit.measure import Measure, Result
from benchmarks.kit.options import Options
from benchmarks.suite.resident import RUNS, started
from benchmarks.usage import below, command_line, launched_at
from stagecoach.coordinator.catalog.run_folder import RunFolder
from stagecoach.coordinator.services.ray_internals import HEAD_MODULE
from stagecoach.shared.base.errors import StagecoachError
from stagecoach.shared.protocol.flow_control import Flow
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.redis_client import connect_redis
from stagecoach.shared.runtime.launch import LOGS

_FIRST_UPDATE = "first update"
_LAUNCHED = "Ray is launched"
_END = "the end of a run"
_AIMS = {_FIRST_UPDATE: 5.0, _END: 1.0}
"""Seconds."""
_MOST_SECONDS = 240.0
_RUN = "run"
_UPDATES = 60
"""Of the run whose end is timed."""
_LINES = {
    "imports and checks are done": ("coordinator", "starting services"),
    "Redis serves": ("coordinator", "Redis serves"),
    "the S3 server serves": ("coordinator", "the S3 server serves"),
    "Ray serves": ("coordinator", "Ray serves"),
    "Ray is joined": ("coordinator", "Ray is joined"),
    "roles are asked for": ("coordinator", "starting roles"),
    "the trainer's process has its imports": ("trainer", "trainer begins"),
    "the trainer is ready": ("trainer", "trainer of run"),
    "the first worker's process has its imports": ("worker-*", "begins"),
    "the first worker has joined": ("worker-*", "joined run"),
}
"""Milestone → logs and the line of them that tells when it was reached first."""


def measure(options: Options) -> Result:
    """Each repeat is a real start of a real run, in a folder of its own; nothing else of the run is timed."""
    found = []
    for repeat in range(options.repeats + (not options.quick)):  # the first one warms the files' cache
        seconds = milestones() | {_END: end()}
        if options.quick or repeat:
            found.append(seconds)
        options.tell(f"{'round ' + str(repeat) if options.quick or repeat else 'warm-up'}: {seconds}")
    names = sorted(found[0], key=lambda name: statistics.median(one[name] for one in found))
    measures = [Measure(name, "s", [one[name] for one in found], better="less", aim=_AIMS.get(name)) for name in names]
    own = [one["Ray is joined"] - one[_LAUNCHED] for one in found]
    note = "launched, serves, joined; the run is checked and other services start meanwhile"
    measures.append(Measure("Ray's own start", "s", own, better="less", note=note))
    return Result(
        "start-up",
        "Seconds from the command `stagecoach train` to each milestone, the first update being the last one.",
        measures,
        settings={"example": RUNS["PPO"], "read from": {name: list(where) for name, where in _LINES.items()}},
    )


def milestones() -> dict[str, float]:
    """Milestone → seconds since the command."""
    with tempfile.TemporaryDirectory(prefix="start-up-") as name:
        folder, began = Path(name), time.time()
        with started("PPO", folder) as process:
            reached = _watched(folder, process)
        logs = folder / _RUN / LOGS
        reached |= {name: _logged(logs, log, line) for name, (log, line) in _LINES.items()}
    return {name: round(moment - began, 3) for name, moment in reached.items()}


def end() -> float:
    """Seconds from the last update to the end of the command."""
    with tempfile.TemporaryDirectory(prefix="start-up-") as name:
        folder, last, at = Path(name), 0, 0.0
        with started("PPO", folder, f"stop_at.updates={_UPDATES}") as process:
            _watched(folder, process)
            client = _connected(folder)
            while client is not None and process.poll() is None:
                with contextlib.suppress(StagecoachError, OSError, redis.RedisError):
                    if last < _UPDATES and (version := Flow(client, _RUN).read().version) != last:
                        last, at = version, time.monotonic()
                time.sleep(0.005)
            return round(time.monotonic() - at, 3)


def _watched(folder: Path, process: subprocess.Popen[bytes]) -> dict[str, float]:
    """Times of Ray's launch, of the first fragment in the log, and of the first published update."""
    client, reached = None, dict[str, float]()
    deadline = time.monotonic() + _MOST_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(StagecoachError, OSError, redis.RedisError):
            client = client or _connected(folder)
            if client is not None:
                if _LAUNCHED not in reached and (launched := _ray_launched(process.pid)) is not None:
                    reached[_LAUNCHED] = launched
                if client.exists(RunKeys(_RUN).produced):
                    reached.setdefault("first fragment", time.time())
                if Flow(client, _RUN).read().version > 0:
                    now = time.time()
                    return {"first fragment": now} | reached | {_FIRST_UPDATE: now}
        time.sleep(0.01 if client is not None else 0.1)
    raise RuntimeError(f"no first update within {_MOST_SECONDS:g} s; the run's process says {process.poll()}")


def _ray_launched(command: int) -> float | None:
    """Start of the embedded Ray's head, a child of the command; it precedes the first line of the log."""
    heads = [pid for pid in below(command) if HEAD_MODULE in command_line(pid)]
    return launched_at(heads[0]) if heads else None


def _connected(folder: Path) -> redis.Redis | None:
    run = RunFolder.find(_RUN, folder)
    address = run.live_address()
    return None if address is None else connect_redis(address, run.config(), "viewer")


def _logged(logs: Path, name: str, line: str) -> float:
    """When a line was logged first in any log of that name, in seconds since the epoch."""
    texts = [path.read_text() for path in logs.glob(f"{name}.log")]
    found = [re.search(rf"^([\d-]+ [\d:]+,\d+) .*{re.escape(line)}", text, re.MULTILINE) for text in texts]
    if not any(found):
        raise RuntimeError(f"{name}.log has no line with {line!r}: {[text[-500:] for text in texts]}")
    first = min(match[1] for match in found if match)
    return datetime.datetime.strptime(first, "%Y-%m-%d %H:%M:%S,%f").astimezone().timestamp()
