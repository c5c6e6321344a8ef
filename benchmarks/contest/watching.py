"""Starts a program of the contest, reads what it tells, and ends it with all that it started (Linux only)."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.provenance import ROOT
from benchmarks.usage import below

_MARK = "STAGECOACH_CONTEST"
"""In the environment of a program and all that it starts, wherever its parents have gone."""
_RUN_MEMORY = "/dev/shm/stagecoach-*"
"""Folder of a run in shared memory; its coordinator keeps a file there open."""
_POLL_SECONDS = 0.02
_SILENT_SECONDS = 120.0
"""A program that tells nothing for so long, starting included, has failed: some fail in a child and live on."""
_LEAVE_SECONDS = 40.0
_SAID_LINES = 3


class ProgramFailed(Exception):
    """A program that ended, or fell silent; the message ends with what it said last."""


@dataclass(frozen=True)
class Program:
    """What is started: a module, the interpreter of its virtual environment, and its settings."""

    module: str
    """Its full name, such as `benchmarks.contest.programs.rllib_ppo`."""
    python: Path
    settings: Mapping[str, Any]
    path: tuple[Path, ...] = ()
    """What it imports from besides its environment."""

    def seeded(self, seed: int) -> Program:
        """The same with another seed."""
        return replace(self, settings={**self.settings, "seed": seed})


@dataclass(frozen=True)
class Told:
    """How far a program was at one instant."""

    at: float
    """Seconds of the monotonic clock, which all processes of a machine share."""
    env_steps: int
    episodes: int
    mean_return: float | None
    weights: str | None = None
    """The digest of what it has learned, at its end."""


def env_steps_per_second(program: Program, warm_seconds: float, window_seconds: float) -> float:
    """Between two things told: the first one `warm_seconds` after it began to tell, and one a window later."""
    with started(program) as (_, told):
        first = next(told)
        start = next(now for now in told if now.at >= first.at + warm_seconds)
        end = next(now for now in told if now.at >= start.at + window_seconds)
    return (end.env_steps - start.env_steps) / (end.at - start.at)


def seconds_to(program: Program, mean_return: float, at_most: float) -> float | None:
    """From the start of its process to the first time it tells that mean return; None where that takes too long."""
    with started(program) as (running, told):
        try:
            for now in told:
                if now.at - running.began > at_most:
                    return None
                if now.mean_return is not None and now.mean_return >= mean_return:
                    return now.at - running.began
        except ProgramEnded:
            return None
    raise AssertionError("what is told has no end but these")


def memory(program: Program, warm_seconds: float, window_seconds: float) -> float:
    """Largest of several measurements of the bytes of all its processes while it trains: proportional set sizes, so
    that a shared page counts once, and the files of its runs in shared memory, which no process maps."""
    with started(program) as (running, told):
        first, most = next(told), 0.0
        for now in told:
            if now.at >= first.at + warm_seconds:
                pids = running.pids()
                most = max(most, sum(map(_proportional, pids)) + _in_shared_memory(pids))
            if now.at >= first.at + warm_seconds + window_seconds:
                return most
    raise AssertionError("what is told has no end but these")


@dataclass(frozen=True)
class Undisturbed:
    """A run from its start to its end."""

    seconds: float
    """From the first thing that it told on."""
    weights: str


def undisturbed(program: Program) -> Undisturbed:
    """Its settings have an end, and it tells its weights there."""
    with started(program) as (_, told):
        first = next(told)
        last = next(now for now in told if now.weights is not None)
    return Undisturbed(last.at - first.at, str(last.weights))


@dataclass(frozen=True)
class Recovery:
    """What a kill of all processes costs who starts the same command again at once."""

    env_steps_lost: int
    """Trained before the kill and not there when the second start begins to train."""
    seconds_to_learn: float
    """From the kill to the first thing learned by the second start."""
    seconds_to_catch_up: float
    """From the kill until it is as far as it was."""
    weights: str


def recovery(program: Program, env_steps: float, delay: float) -> Recovery:
    """Killed `delay` seconds after it told so many env steps; its settings have `keep`, where its checkpoints stay."""
    with started(program) as (running, told):
        before = next(now for now in told if now.env_steps >= env_steps)
        if before.weights is not None:
            raise ProgramFailed(f"ended before it could be killed after {env_steps:g} env steps")
        time.sleep(delay)
        running.kill()
    killed = time.monotonic()
    with started(program) as (_, told):
        resumed = next(told)
        learns = caught_up = float("nan")
        for now in told:
            if now.env_steps > resumed.env_steps and learns != learns:
                learns = now.at - killed
            if now.env_steps >= before.env_steps and caught_up != caught_up:
                caught_up = now.at - killed
            if now.weights is not None:
                lost = max(0, before.env_steps - resumed.env_steps)
                return Recovery(lost, learns, caught_up, now.weights)
    raise AssertionError("what is told has no end but these")


class ProgramEnded(ProgramFailed):
    """It came to an end of its own, without an error."""


@dataclass(frozen=True)
class Running:
    """A program that was started."""

    process: subprocess.Popen[bytes]
    mark: str
    began: float

    def pids(self) -> list[int]:
        """Of it and of all that it has started, wherever their parents have gone and whatever their environment is."""
        return sorted({*_marked(self.mark), self.process.pid, *below(self.process.pid)})

    def kill(self) -> None:
        """All of them by SIGKILL, until none is left."""
        pids = self.pids()
        while pids:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()
            pids = _marked(self.mark)


@contextmanager
def started(program: Program) -> Iterator[tuple[Running, Iterator[Told]]]:
    """It, and what it tells; at the end it and all that it started are gone, and its folder too."""
    mark = secrets.token_hex(8)
    with tempfile.TemporaryDirectory(prefix="contest-") as name, open(Path(name) / "log", "w+b") as log:
        folder = Path(name)
        given, tells = folder / "given.json", folder / "told"
        settings = {**program.settings, "folder": str(folder / "work")}
        given.write_text(json.dumps({"settings": settings, "tell": str(tells), "cores": cores()}))
        tells.touch()
        path = os.pathsep.join(map(str, (ROOT, *program.path)))
        environment = os.environ | {"PYTHONPATH": path, _MARK: mark}
        environment.pop("VIRTUAL_ENV", None)
        began = time.monotonic()
        process = subprocess.Popen(
            [str(program.python), "-m", program.module, str(given)],
            cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            yield Running(process, mark, began), _lines(process, tells, Path(name) / "log")
        finally:
            _end(process, mark)


def cores() -> list[int]:
    """The first two of those that this process may use: everything runs on the same."""
    return sorted(os.sched_getaffinity(0))[:2]


def _lines(process: subprocess.Popen[bytes], tells: Path, log: Path) -> Iterator[Told]:
    """As they come; raises `ProgramFailed` once there will be no more."""
    heard = time.monotonic()
    with tells.open() as file:
        begun = ""
        while True:
            ended = process.poll() is not None
            begun += file.readline()
            if begun.endswith("\n"):
                heard = time.monotonic()
                yield Told(**json.loads(begun))
                begun = ""
            elif ended:
                failed = ProgramFailed if process.returncode else ProgramEnded
                raise failed(f"ended with code {process.returncode}: {_said(log)}")
            elif time.monotonic() > heard + _SILENT_SECONDS:
                raise ProgramFailed(f"told nothing for {_SILENT_SECONDS:.0f} s: {_said(log)}")
            else:
                time.sleep(_POLL_SECONDS)


def _said(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-_SAID_LINES:])[-500:] or "(it said nothing)"


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """It is asked first, so that it ends its own servers; what then is left of it is killed."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
    deadline = time.monotonic() + _LEAVE_SECONDS
    while (left := _marked(mark)) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(_POLL_SECONDS)


def _proportional(pid: int) -> float:
    """Bytes; 0 of one that has gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) * 1024.0 for line in lines if line.startswith("Pss:")), 0.0)


def _in_shared_memory(pids: Iterable[int]) -> float:
    """Bytes of all files in the shared-memory folders of Stagecoach's runs that these processes hold."""
    folders, size = set[Path](), 0.0
    for entry in (entry for pid in pids for entry in _open_files(pid)):
        with contextlib.suppress(OSError):
            folder = Path(os.readlink(entry)).parent
            if folder.match(_RUN_MEMORY):
                folders.add(folder)
    for path in (Path(at, name) for folder in folders for at, _, names in os.walk(folder) for name in names):
        with contextlib.suppress(OSError):
            size += path.stat().st_blocks * 512.0
    return size


def _open_files(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return []


def _marked(mark: str) -> list[int]:
    """Processes that have this in their environment; zombies have none."""
    wanted, found = f"{_MARK}={mark}".encode(), []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it has gone, or is somebody else's
        if wanted in variables:
            found.append(int(folder.name))
    return found
