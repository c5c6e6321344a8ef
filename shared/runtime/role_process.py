"""A role in a process of its own: what it is started with, the process itself, and how it ended.

The process is forked by its node's zygote (shared/runtime/zygote.py), which has imported PyTorch and the roles' modules
already; without a zygote it is a new Python. Both receive the same request and act on it in the same way.
"""

import contextlib
import faulthandler
import importlib
import json
import logging
import os
import signal
import stat
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from typing import Self

from stagecoach.shared.base.errors import Fenced
from stagecoach.shared.base.failure import Failure, FailureKind, RoleEnd
from stagecoach.shared.base.process import ExitDiagnostics, Secrets, at_rest, child_environment, exit_diagnostics, spawn
from stagecoach.shared.runtime.zygote import HEAD, Forked, fork

_LOGGER = logging.getLogger("stagecoach.launch")
_TAIL_BYTES = 16 << 10
"""Bytes at the end of a standard error that are searched for how a process ended."""


def with_length(data: bytes) -> bytes:
    return len(data).to_bytes(HEAD, "big") + data


def split(data: bytes) -> tuple[bytes, bytes]:
    """Splits what begins with a length into the bytes that it counts and the rest."""
    end = HEAD + int.from_bytes(data[:HEAD], "big")
    return data[HEAD:end], data[end:]


@dataclass(frozen=True)
class RoleExit:
    """The end of a role's process: one of `reason`, `failure` and `died`."""

    pid: int
    reason: str = ""
    """Value that its `run` returned."""
    failure: Failure | None = None
    """Exception that it raised."""
    fenced: bool = False
    """True if it raised `Fenced`: another trainer has taken over."""
    trace: str = ""
    died: ExitDiagnostics | None = None


@dataclass(frozen=True)
class Request:
    """A function to be run, as `module:function`, which is called with these bytes and the role's name."""

    target: str
    name: str
    given: bytes
    """Such as an encoded `RoleLaunch`, which is decoded there alone: its module imports most of the rest."""
    path: list[str]
    environment: dict[str, str]
    folder: str

    @classmethod
    def of(cls, target: str, name: str, given: bytes, *secrets: Secrets) -> Self:
        """A request with this process's import path and working directory, and the environment variables of a child
        that may have these secrets."""
        return cls(target, name, given, sys.path, child_environment(*secrets), os.getcwd())

    def encoded(self) -> bytes:
        """The length of a JSON object, that object, and `given`."""
        return with_length(json.dumps({k: v for k, v in vars(self).items() if k != "given"}).encode()) + self.given

    @classmethod
    def decoded(cls, data: bytes) -> Self:
        head, given = split(data)
        return cls(given=given, **json.loads(head))


class RoleProcess:
    """The process of a role, started by this one and ended with it. Its output goes where this process's goes."""

    def __init__(self, request: Request, zygote: str) -> None:
        """Starts it, from the zygote of this name where that is possible; raises `OSError` where no process starts."""
        self._errors = _StandardError()
        self._result = tempfile.TemporaryFile()  # noqa: SIM115 – until `wait`; a pipe would block a role that reports much
        self._process = start(request, zygote, (1, 2, self._result.fileno()))
        self.pid = self._process.pid

    def signal(self, number: signal.Signals) -> None:
        """Sends it a signal, unless it has ended."""
        self._process.send_signal(number)

    def wait(self) -> RoleExit:
        """Blocks until it has ended; signal handlers run meanwhile."""
        status = self._process.wait()
        assert status is not None
        with self._result as file:
            file.seek(0)
            report = file.read()
        try:
            told = json.loads(report)
        except ValueError:  # none, or one that was cut off
            return RoleExit(self.pid, died=self._errors.diagnostics(status))
        failure = Failure(FailureKind(told["kind"]), told["detail"]) if told["kind"] else None
        return RoleExit(self.pid, told["reason"], failure, told["fenced"], told["trace"])


def start(request: Request, zygote: str, files: tuple[int, int, int]) -> Forked | subprocess.Popen[bytes]:
    """Starts the process of a request with these standard output, standard error and result, from this zygote where
    that is possible, else as a new Python; raises `OSError` where no process starts."""
    if (forked := fork(zygote, request.encoded(), files)) is not None:
        return forked
    out, errors, result = files
    command = [sys.executable, "-P", "-m", __name__, str(result)]
    return spawn(
        command, request.encoded(), signal.SIGKILL, stdout=out, stderr=errors, pass_fds=(result,),
        env=request.environment,
    )  # fmt: skip


class _StandardError:
    """This process's standard error from here on, where that is a file, as Ray makes it."""

    def __init__(self) -> None:
        self._begin = os.fstat(2).st_size

    def diagnostics(self, status: int) -> ExitDiagnostics:
        """Describes the end of a process by its status (negative: a signal) and its last output there."""
        said = ""
        with contextlib.suppress(OSError), open("/proc/self/fd/2", "rb") as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                file.seek(max(self._begin, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
                said = file.read().decode(errors="replace")
        how = signal.Signals(-status).name if status < 0 else f"exit code {status}"
        found = exit_diagnostics(said)
        return found._replace(how=found.how or (None if status == -signal.SIGKILL else how))


def act(request: Request, result: int) -> int:
    """Runs the role in this process, which is its own; returns the exit code."""
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    sys.path[:] = request.path
    faulthandler.enable(all_threads=False)
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as shown:  # by ps and top
        shown.write(request.name)
    told = {"reason": "", "kind": "", "detail": "", "fenced": False, "trace": ""}
    try:
        module, _, name = request.target.partition(":")
        with at_rest():
            run = getattr(importlib.import_module(module), name)
        told["reason"] = str(run(request.given, request.name))
    except KeyboardInterrupt:  # a second signal ended it at once
        told["reason"] = RoleEnd.PREEMPTED
    except Exception as error:
        failure = Failure.of(error)
        _LOGGER.exception("%s failed", request.name)
        told |= {"kind": failure.kind, "detail": failure.detail, "fenced": isinstance(error, Fenced)}
        told["trace"] = traceback.format_exc()
    with open(result, "wb") as file:
        file.write(json.dumps(told).encode())
    return 1 if told["kind"] else 0


if __name__ == "__main__":
    sys.exit(act(Request.decoded(sys.stdin.buffer.read()), int(sys.argv[1])))
