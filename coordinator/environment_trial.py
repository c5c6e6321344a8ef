"""Trying a run's environment before anything starts: in a process of its own, which may hang, crash or be ended.

In: the config. Out: agents and spaces, and everything that is wrong (rollout_worker/environment_check.py finds it).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import IO, Any

from rollout_worker.environment_check import FATAL, NOTE, RAISED, Problem
from shared import errors
from shared.child import child_environment, end_with_parent, signals_after
from shared.config import Config
from shared.errors import EnvironmentUnusable, UserError
from shared.last_words import last_words
from shared.spaces import EnvironmentDescription
from shared.user_code import SOURCE

SHORT_STEPS = 10
"""Of the trial before a run: a wrong interface shows in the first."""
_GRACE_SECONDS = 60.0
"""The process watches its own calls; only one that is stopped, or never begins, says nothing for this much longer."""
_LOOK_SECONDS = 0.1
_OURS = f"{SOURCE}/rollout_worker/"
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


@dataclass(frozen=True)
class Trial:
    """What became of it."""

    description: EnvironmentDescription | None
    problems: tuple[Problem, ...]
    error: UserError | None = None
    """It cannot be used at all, or the config does not fit it."""
    stack: str = ""
    """Of a call that hangs, innermost first."""

    def refuse(self, config: Config, strict: bool) -> EnvironmentDescription:
        """The description; raises `UserError` with all that keeps a run from learning in it.

        That it raised is no such thing unless `strict`: `environment.failures_allowed` says how often that may be.
        """
        if self.error is not None:
            raise self.error
        severities = {FATAL, RAISED} if strict or self.description is None else {FATAL}
        told = [str(problem) for problem in self.problems if problem.severity in severities]
        if told or self.description is None:
            raise EnvironmentUnusable(
                f"{config.environment.id}: {' | '.join(told)} (`stagecoach check` tells everything)"
            )
        return self.description

    @property
    def fine(self) -> bool:
        """Whether nothing is wrong; what is only noted does no harm here."""
        return self.error is None and all(problem.severity == NOTE for problem in self.problems)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        agents = self.description.as_dict() if self.description is not None else None
        problems = [asdict(problem) for problem in self.problems]
        error = str(self.error) if self.error is not None else None
        return {"fine": self.fine, "error": error, "problems": problems, "stack": self.stack, "description": agents}


def try_environment(
    config: Config,
    steps: int = SHORT_STEPS,
    seed: int = 0,
    deadline_seconds: float | None = None,
    whole: bool = False,
    alone: bool = False,
    any_api: bool = False,
) -> Trial:
    """Makes the config's environment in another process, and acts `steps` random steps in it.

    No call may take longer than `deadline_seconds` (by default `environment.step_deadline_seconds`). With `whole` it
    also looks whether the environment follows its seed; `alone` is for one that no run is meant for yet, and with
    `any_api` that may be of PettingZoo whatever the config says.
    """
    deadline = deadline_seconds or config.environment.step_deadline_seconds
    asked = {
        "config": config.model_dump(mode="json"), "steps": steps, "seed": seed, "deadline_seconds": deadline,
        "import_path": sys.path, "whole": whole, "alone": alone,
        "any_api": any_api,
    }  # fmt: skip
    with tempfile.TemporaryFile() as said:
        process = _begin(json.dumps(asked).encode(), said)
        try:
            lines = list(_lines(process, deadline + _GRACE_SECONDS))
        finally:
            with contextlib.suppress(ProcessLookupError):  # its own processes as well
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        said.seek(0)
        return _trial(config, lines, process.returncode, said.read().decode(errors="replace"), deadline)


def _begin(asked: bytes, said: IO[bytes]) -> subprocess.Popen[bytes]:
    paths = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    with signals_after():
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rollout_worker.environment_check"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, start_new_session=True,
            env=child_environment("store", PYTHONPATH=paths), preexec_fn=end_with_parent(signal.SIGKILL),
        )  # fmt: skip
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(asked)
        process.stdin.close()
    return process


def _lines(process: subprocess.Popen[bytes], silent_seconds: float) -> Iterator[dict[str, Any]]:
    """What it tells, until it is done, has ended, or says nothing any more. Its own children may hold the pipe."""
    assert process.stdout is not None
    rest, heard = b"", time.monotonic()
    while time.monotonic() - heard < silent_seconds:
        ended = process.poll() is not None
        if select.select([process.stdout], [], [], 0 if ended else _LOOK_SECONDS)[0]:
            chunk = os.read(process.stdout.fileno(), 1 << 16)
            *whole, rest = (rest + chunk).split(b"\n")
            heard = time.monotonic()
            for line in map(json.loads, whole):
                yield line
                if "done" in line:
                    return
            if not chunk:
                process.wait()
                return
        elif ended:
            return


def _trial(config: Config, lines: list[dict[str, Any]], code: int, said: str, deadline: float) -> Trial:
    told = {name: value for line in lines for name, value in line.items()}
    problems = [Problem(**line["problem"]) for line in lines if "problem" in line]
    described = told.get("description")
    description = EnvironmentDescription.from_dict(described) if described is not None else None
    if "error" in told:
        kind = getattr(errors, told["error"])
        return Trial(description, tuple(problems), kind(told["text"]))
    if "done" in told:
        return Trial(description, tuple(problems))
    doing, (_, hangs, stack) = told.get("doing", "the start of its process"), said.rpartition("Timeout (")
    stack = stack.rpartition("Thread 0x")[2].partition("\n")[2]  # of the main thread, which comes last
    stack = "".join(line for line in stack.splitlines(True) if _OURS not in line and "<frozen runpy>" not in line)
    expected = f"a call that returns within {deadline:g} s"
    if hangs:
        frame = _FRAME.search(stack)
        at = f", at {frame[1]}:{frame[2]} in {frame[3]}" if frame else ""
        problems.append(
            Problem(FATAL, f"{doing} hangs{at}", expected, "look why it does not return, or give it more time")
        )
    elif code == -signal.SIGKILL and lines:
        problems.append(_death(doing, "SIGKILL (from outside; perhaps its memory ran out)", said))
    else:
        words = last_words(said)
        how = signal.Signals(-code).name if code < 0 else words.how or f"exit code {code}"
        problems.append(_death(doing, how, said))
    return Trial(description, tuple(problems), stack=stack if hangs else "")


def _death(doing: str, how: str, said: str) -> Problem:
    words = " | ".join(line.strip() for line in last_words(said).lines)
    found = f"{doing} ended its process with {how}" + (f"; it said last: {words}" if words else "")
    return Problem(FATAL, found, "a call that returns", "see what it says; an environment may not end its process")
