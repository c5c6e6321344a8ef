"""What else carries arrays from one process to another: programs that stand alone, each with its own interpreter."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue

import numpy as np

from benchmarks.contest.virtual_environments import NotInstalled
from benchmarks.kit.options import Options
from stagecoach.shared.experience.spaces import Array

_PROGRAMS = Path(__file__).parent / "programs"
_READY_SECONDS, _SAMPLE_SECONDS, _END_SECONDS = 120.0, 120.0, 20.0


@dataclass(frozen=True)
class Other:
    """One of them."""

    name: str
    program: str
    module: str
    """What it imports."""


OTHERS = (
    Other("Ray's object store", "through_ray.py", "ray"),
    Other("TorchRL's remote replay buffer", "through_torchrl.py", "torchrl"),
)


class OtherFailed(RuntimeError):
    """The program said something else than it should, or nothing."""


class Program:
    """A running program, which carries so many fragments for each sample."""

    def __init__(self, python: str, program: str, arrays: Path, count: int) -> None:
        self._count = count
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in `close`
        command = [python, str(_PROGRAMS / program), str(arrays), str(count)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, start_new_session=True
        )
        self._lines: Queue[str] = Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._said("READY", _READY_SECONDS)

    def fragments_per_second(self) -> float:
        """One sample; raises `OtherFailed`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it is gone; what it said last tells why
        return self._count / float(self._said("SECONDS", _SAMPLE_SECONDS))

    def close(self) -> None:
        """Ends it, and what it has started."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(_END_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _said(self, word: str, seconds: float) -> str:
        """What follows this word in the next line that begins with it."""
        while True:
            try:
                line = self._lines.get(timeout=seconds)
            except Empty:
                raise OtherFailed(f"nothing within {seconds:g} s") from None
            if not line:
                self._log.seek(0)
                last = next((text for text in reversed(self._log.read().splitlines()) if text.strip()), "nothing")
                raise OtherFailed(f"it ended; it said last: {last.strip()}")
            if line.startswith(word):
                return line.removeprefix(word).strip()


@contextmanager
def running(
    options: Options, arrays: Mapping[str, Array], count: int
) -> Iterator[tuple[dict[str, Program], list[str]]]:
    """Name → program of those that are asked for and can run here; and a remark on each that cannot."""
    programs: dict[str, Program] = {}
    remarks = []
    with ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="arrays-"))) / "fragment.npz"
        np.savez(path, **dict(arrays))  # type: ignore[arg-type]
        for other in OTHERS:
            if not options.wants(other.name):
                continue
            try:
                programs[other.name] = Program(_python(other), other.program, path, count)
                stack.callback(programs[other.name].close)
            except (NotInstalled, OtherFailed) as error:
                remarks.append(f"{other.name} was not measured: {error}")
        yield programs, remarks


def _python(other: Other) -> str:
    if importlib.util.find_spec(other.module) is None:
        raise NotInstalled(f"{other.module} is not installed here; it is part of the extra `dev`")
    return sys.executable
