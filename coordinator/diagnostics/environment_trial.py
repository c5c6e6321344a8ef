"""Trying a run's environment before anything starts: in a process of its own, which may hang, crash or be ended.

In: the config. Out: agents and spaces, and everything that is wrong (rollout_worker/environments/checking/ finds it).
"""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from stagecoach.coordinator.services.ray_head import zygote_token
from stagecoach.rollout_worker.environments.checking.check import Check
from stagecoach.rollout_worker.environments.checking.report import FATAL, NOTE, RAISED, Problem
from stagecoach.shared.base import errors, world
from stagecoach.shared.base.errors import PACKAGE, EnvironmentUnusable, UserError
from stagecoach.shared.base.process import exit_diagnostics
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.spaces import EnvironmentDescription
from stagecoach.shared.runtime.role_process import Request, start
from stagecoach.shared.runtime.zygote import Forked

SHORT_STEPS = 10
"""Steps of the trial before a run; a wrong interface shows in the first."""
_GRACE_SECONDS = 60.0
"""The process watches its own calls; only one that is stopped, or never begins, says nothing for this much longer."""
_POLL_SECONDS = 0.1
_CHECK = "stagecoach.rollout_worker.environments.checking.check"
_OURS = f"{PACKAGE}/rollout_worker/"
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


@dataclass(frozen=True)
class Trial:
    description: EnvironmentDescription | None
    problems: tuple[Problem, ...]
    error: UserError | None = None
    """Reason that the environment is unusable or does not fit the config."""
    stack: str = ""
    """Stack of a hung call, innermost first."""

    def refuse(self, config: Config, strict: bool) -> EnvironmentDescription:
        """The description; raises `UserError` with all that keeps a run from learning in it.

        Exceptions count only if `strict`: `environment.failures_allowed` tolerates some.
        """
        if self.error is not None:
            raise self.error
        severities = {FATAL, RAISED} if strict or self.description is None else {FATAL}
        told = " | ".join(str(problem) for problem in self.problems if problem.severity in severities)
        if told or self.description is None:
            raise EnvironmentUnusable(f"{config.environment.id}: {told} (`stagecoach check` lists everything)")
        return self.description

    @property
    def fine(self) -> bool:
        """True if nothing is wrong; notes are harmless."""
        return self.error is None and all(problem.severity == NOTE for problem in self.problems)

    def as_dict(self) -> dict[str, Any]:
        agents = self.description.as_dict() if self.description is not None else None
        problems = [asdict(problem) for problem in self.problems]
        error = str(self.error) if self.error is not None else None
        return {"fine": self.fine, "error": error, "problems": problems, "stack": self.stack, "description": agents}


def try_environment(
    config: Config, steps: int = SHORT_STEPS, seed: int = 0, deadline_seconds: float | None = None,
    whole: bool = False, alone: bool = False, any_api: bool = False,
) -> Trial:  # fmt: skip
    """Makes the config's environment in another process, and acts `steps` random steps in it.

    One that a program gave as an object is tried in this process, without a deadline.

    Args:
        deadline_seconds: for each call, by default `environment.step_deadline_seconds`.
        whole: also checks that the environment follows its seed.
        alone: for an environment without a run's config.
        any_api: then it may be of PettingZoo whatever the config says.
    """
    if config.environment.given_object is not None:
        lines: list[dict[str, Any]] = []
        Check(config, seed, None, lines.append).run(steps, whole, alone, any_api)
        return _trial([*lines, {"done": True}], 0, "", 0)
    deadline = deadline_seconds or config.environment.step_deadline_seconds
    asked = {
        "config": config.model_dump(mode="json"), "steps": steps, "seed": seed, "deadline_seconds": deadline,
        "whole": whole, "alone": alone, "any_api": any_api,
    }  # fmt: skip
    read, write = os.pipe()
    with tempfile.TemporaryFile() as said, open(read, "rb", buffering=0) as found:
        with open(write, "wb", buffering=0) as out:
            request = Request.of(f"{_CHECK}:run", "trial", json.dumps(asked).encode(), "store")
            process = start(request, zygote_token(), (out.fileno(), said.fileno(), said.fileno()))
        try:
            lines = list(_lines(process, found.fileno(), deadline + _GRACE_SECONDS))
        finally:
            with contextlib.suppress(ProcessLookupError):  # its own processes as well
                os.killpg(process.pid, signal.SIGKILL)
            process.send_signal(signal.SIGKILL)  # it may have left its group
            code = process.wait()
        said.seek(0)
        return _trial(lines, code or 0, said.read().decode(errors="replace"), deadline)


def _lines(process: subprocess.Popen[bytes] | Forked, out: int, silent_seconds: float) -> Iterator[dict[str, Any]]:
    """Yields messages until the process is done, ends or falls silent. Its children may hold the pipe."""
    rest, heard = b"", world.monotonic()
    while world.monotonic() - heard < silent_seconds:
        ended = process.poll() is not None
        if select.select([out], [], [], 0 if ended else _POLL_SECONDS)[0]:
            chunk = os.read(out, 1 << 16)
            *whole, rest = (rest + chunk).split(b"\n")
            heard = world.monotonic()
            for line in map(json.loads, whole):
                yield line
                if "done" in line:
                    return
            if not chunk:
                process.wait()
                return
        elif ended:
            return


def _trial(lines: list[dict[str, Any]], code: int, said: str, deadline: float) -> Trial:
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
    if hangs:
        at = f", at {frame[1]}:{frame[2]} in {frame[3]}" if (frame := _FRAME.search(stack)) else ""
        remedy = "find out why it does not return, or give it more time"
        problems.append(Problem(FATAL, f"{doing} hangs{at}", f"a call that returns within {deadline:g} s", remedy))
    else:
        words = exit_diagnostics(said)
        how = signal.Signals(-code).name if code < 0 else words.how or f"exit code {code}"
        if code == -signal.SIGKILL and lines:
            how = "SIGKILL (from outside; perhaps its memory ran out)"
        last = f"; it said last: {' | '.join(line.strip() for line in words.lines)}" if words.lines else ""
        remedy = "see what it says; an environment may not end its process"
        problems.append(Problem(FATAL, f"{doing} ended its process with {how}{last}", "a call that returns", remedy))
    return Trial(description, tuple(problems), stack=stack if hangs else "")
