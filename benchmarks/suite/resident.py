"""Resident sizes of all processes of a real run, by role: at its start, and the largest while it works."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.kit.options import Options
from benchmarks.provenance import ROOT
from benchmarks.usage import below, command_line, parent
from stagecoach.coordinator.run_access.run import Run
from stagecoach.shared.base.errors import StagecoachError
from stagecoach.shared.runtime.zygote import SERVER

RUNS = {"PPO": "cartpole.yaml", "DQN": "cartpole_dqn.yaml"}
"""Name → the example that is run."""
_ENDLESS = ("stop_at.env_steps=1000000000", "stop_at.mean_return=null")
_START_SECONDS, _WORK_SECONDS, _QUICK_SECONDS = 240.0, 20.0, 3.0
_SERVERS = (("redis", "Redis"), ("valkey", "Redis"), ("rclone", "S3 server"), ("gcs_server", "Ray"), ("raylet", "Ray"))


def sizes_of(run: str, options: Options) -> dict[str, float]:
    """Line → MB: `trainer at the start`, `trainer at work` … of one start of a run."""
    seconds = _QUICK_SECONDS if options.quick else _WORK_SECONDS
    with tempfile.TemporaryDirectory(prefix="resident-") as folder, started(run, Path(folder)) as process:
        handle = _attached(Path(folder), process)
        first: dict[str, float] = {}
        largest: dict[str, float] = {}
        deadline, until = time.monotonic() + _START_SECONDS, float("inf")
        while time.monotonic() < min(until, deadline):
            version, roles = _look(handle)
            now = _sizes(process.pid, roles)
            for name, size in now.items():
                first.setdefault(name, size)
                largest[name] = max(largest.get(name, 0.0), size)
            if version > 0 and until == float("inf"):
                until = time.monotonic() + seconds
            if process.poll() is not None:
                raise RuntimeError(f"the run of {RUNS[run]} has ended too soon, with {process.returncode}")
            time.sleep(0.5)
        if until == float("inf"):
            raise RuntimeError(f"the run of {RUNS[run]} did not learn within {_START_SECONDS:g} s")
        options.tell(f"{run}: {largest}")
    at_start = {f"{name} at the start": size for name, size in first.items()}
    return at_start | {f"{name} at work": size for name, size in largest.items()}


@contextlib.contextmanager
def started(run: str, folder: Path, *sets: str) -> Iterator[subprocess.Popen[bytes]]:
    """`stagecoach train` with an example, as a process; it is ended in order, and whatever happens it is gone."""
    stagecoach = Path(sys.executable).with_name("stagecoach")
    command = [str(stagecoach), "train", str(ROOT / "examples" / RUNS[run]), "--run-id", "run"]
    command += [f"--set={item}" for item in (f"runs_dir={folder}", *_ENDLESS, *sets)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()  # its children end with it
            process.wait()


def _attached(folder: Path, process: subprocess.Popen[bytes]) -> Run:
    deadline = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(StagecoachError):
            handle = Run.attach("run", folder)
            if handle.live:
                return handle
        time.sleep(0.1)
    raise RuntimeError("the run did not start")


def _look(handle: Run) -> tuple[int, dict[int, str]]:
    """The policy version, and process id → role of all that beat; −1 and none before there is something to see."""
    try:
        status = handle.status(accounting=False)
    except (StagecoachError, OSError):
        return -1, {}
    return status.version, {beat.pid: beat.role for beat in status.roles if beat.alive}


def _sizes(coordinator: int, roles: dict[int, str]) -> dict[str, float]:
    """Role → MB: the largest worker; of Ray all processes together that are not a role's.

    Roles are forked by the zygote, which is detached from the coordinator, and share its command line.
    """
    zygotes = {pid for pid in map(parent, roles) if pid is not None and SERVER in command_line(pid)}
    names = dict.fromkeys(zygotes, "zygote") | roles | {coordinator: "coordinator"}
    found: dict[str, float] = {}
    for pid in dict.fromkeys([coordinator, *below(coordinator), *names]):
        size, name = _resident(pid), names.get(pid) or _server(pid)
        if name is None or size is None:
            continue
        found[name] = found.get(name, 0.0) + size if name == "Ray" else max(found.get(name, 0.0), size)
    return found


def _server(pid: int) -> str | None:
    """Name of the server or library that a process without a heartbeat belongs to; None for other processes."""
    words = command_line(pid)
    program = words.partition(" ")[0].rpartition("/")[2]
    for part, name in _SERVERS:
        if part in program:
            return name
    return "Ray" if words.startswith("ray::") or "ray.scripts" in words or "/ray/" in words else None


def _resident(pid: int) -> float | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS")), None)
