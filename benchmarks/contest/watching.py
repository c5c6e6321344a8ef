"""Starts a program of the contest, reads what it tells, and ends it with all that it started (Linux only)."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.provenance import ROOT

_MARK = "STAGECOACH_CONTEST"
"""In the environment of a program and all that it starts, wherever its parents have gone."""
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
    """Its full name, such as `benchmarks.contest.programs.stable_baselines3_ppo`."""
    python: Path
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Told:
    """How far a program was at one instant."""

    at: float
    """Seconds of the monotonic clock, which all processes of a machine share."""
    env_steps: int
    episodes: int
    mean_return: float | None


def env_steps_per_second(program: Program, warm_seconds: float, window_seconds: float) -> float:
    """Between two things told: the first one `warm_seconds` after it began to tell, and one a window later."""
    with _started(program) as (_, told):
        first = next(told)
        start = next(now for now in told if now.at >= first.at + warm_seconds)
        end = next(now for now in told if now.at >= start.at + window_seconds)
    return (end.env_steps - start.env_steps) / (end.at - start.at)


def seconds_to(program: Program, mean_return: float, at_most: float) -> float | None:
    """From the start of its process to the first time it tells that mean return; None where that takes too long."""
    with _started(program) as (began, told):
        try:
            for now in told:
                if now.at - began > at_most:
                    return None
                if now.mean_return is not None and now.mean_return >= mean_return:
                    return now.at - began
        except ProgramEnded:
            return None
    raise AssertionError("what is told has no end but these")


class ProgramEnded(ProgramFailed):
    """It came to an end of its own, without an error."""


@contextmanager
def _started(program: Program) -> Iterator[tuple[float, Iterator[Told]]]:
    """When it was started, and what it tells; at the end it and all that it started are gone, and its folder too."""
    mark = secrets.token_hex(8)
    with tempfile.TemporaryDirectory(prefix="contest-") as name, open(Path(name) / "log", "w+b") as log:
        folder = Path(name)
        given, tells = folder / "given.json", folder / "told"
        settings = {**program.settings, "folder": str(folder / "work")}
        given.write_text(json.dumps({"settings": settings, "tell": str(tells), "cores": cores()}))
        tells.touch()
        environment = os.environ | {"PYTHONPATH": str(ROOT), _MARK: mark}
        environment.pop("VIRTUAL_ENV", None)
        began = time.monotonic()
        process = subprocess.Popen(
            [str(program.python), "-m", program.module, str(given)],
            cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            yield began, _lines(process, tells, Path(name) / "log")
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
