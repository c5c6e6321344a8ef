"""What is told of an environment that is tried: each problem once, and each call by its name and with a deadline."""

import contextlib
import faulthandler
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from stagecoach.shared.base.errors import EnvironmentUnusable
from stagecoach.shared.base.printable import counted

FATAL, RAISED, WRONG, NOTE = "fatal", "raised", "wrong", "note"
"""A run cannot learn in it; it raised (`environment.failures_allowed` bears some); it is wrong; it does no harm."""
_NO_WARNING = "no warning"
_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Problem:
    severity: str
    found: str
    expected: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.found}; expected {self.expected}; {self.remedy}"


class Unsteppable(Exception):
    """Nothing more can be found out: a problem was told that keeps from going on."""


class Report:
    """Makes the calls, each by its name and with a deadline, and tells what is wrong."""

    def __init__(self, deadline_seconds: float, tell: Callable[[dict[str, Any]], None]) -> None:
        self._deadline, self.tell = deadline_seconds, tell
        self._told: set[tuple[str, str]] = set()
        self._written: dict[str, list[int]] = {}
        """Call → bytes that it wrote to standard output or error, of each time that it wrote any."""

    def add(self, severity: str, found: str, expected: str, remedy: str) -> None:
        """Tells it once, however often it is found."""
        if (key := (expected, found if expected == _NO_WARNING else remedy)) not in self._told:
            self._told.add(key)
            self.tell({"problem": asdict(Problem(severity, found, expected, remedy))})

    def fatal(self, found: str, expected: str, remedy: str) -> NoReturn:
        """Tells what keeps from finding out anything more."""
        self.add(FATAL, found, expected, remedy)
        raise Unsteppable

    def raised(self, what: str, error: BaseException) -> NoReturn:
        frames = traceback.extract_tb(error.__traceback__)
        if isinstance(error, EnvironmentUnusable):  # of ours, which says what is wrong and what to do
            self.tell({"error": type(error).__name__, "text": str(error)})
            raise Unsteppable from None
        mine = [frame for frame in frames if Path(frame.filename).parent != _HERE] or list(frames)
        raised = f"{type(error).__name__}: {' '.join(str(error).split())} (at {mine[-1].filename}:{mine[-1].lineno})"
        self.add(RAISED, f"{what} raised {raised}", "no exception", "mend the environment")
        raise Unsteppable from None

    def calling(self, what: str, call: Callable[[], Any]) -> Any:
        """One call with its name and its deadline; warnings of Gymnasium's own checkers are told as notes."""
        self.tell({"doing": what})
        faulthandler.dump_traceback_later(self._deadline, exit=True)
        before = _bytes_said()
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always", UserWarning)
                return call()
        finally:
            faulthandler.cancel_dump_traceback_later()
            if wrote := _bytes_said() - before:
                self._written.setdefault(what, []).append(wrote)
            for item in said:
                if issubclass(item.category, UserWarning):
                    text = " ".join(str(item.message).split()).removeprefix("\x1b[33mWARN:").removesuffix("\x1b[0m")
                    self.add(NOTE, f"{what} warns: {text.strip()}", _NO_WARNING, "see to it")

    def guarded(self, what: str, call: Callable[[], Any]) -> Any:
        """As `calling`; that it raises is a problem that keeps from going on."""
        try:
            return self.calling(what, call)
        except (Exception, SystemExit) as error:
            self.raised(what, error)

    def chatter(self) -> None:
        """Tells which calls write something; once may be a library's greeting."""
        for call in ("step()", "reset()"):
            if len(written := self._written.get(call, ())) > 1:
                found = f"{call} printed {counted(sum(written), 'byte')} in {counted(len(written), 'call')}"
                expected = "no output: it slows each step and floods the logs of the workers"
                self.add(NOTE, found, expected, f"take the print out of {call}, or put it behind a flag")


def _bytes_said() -> int:
    """How much was written to standard output and error so far, which are one file (`main`)."""
    with contextlib.suppress(ValueError, OSError, AttributeError):  # the environment may have closed it
        sys.stdout.flush()
    return os.fstat(2).st_size
