"""Report of an environment trial: each problem once, and each call with its name and a deadline."""

import faulthandler
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn

from stagecoach.shared.base.errors import EnvironmentUnusable

_NO_WARNING = "no warning"
_HERE = Path(__file__).parent


class Severity(StrEnum):
    FATAL = "fatal"
    """A run cannot learn in the environment."""
    RAISED = "raised"
    """Exception, of which `environment.failures_allowed` tolerates some."""
    WRONG = "wrong"
    NOTE = "note"
    """Harmless."""


FATAL, RAISED, WRONG, NOTE = Severity


@dataclass(frozen=True)
class Problem:
    severity: Severity
    found: str
    expected: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.found}; expected {self.expected}; {self.remedy}"


class Unsteppable(Exception):
    """The trial cannot continue; the problem that prevents it is already in the report."""


class Report:
    """Makes calls, each with its name and a deadline, and sends what is wrong to `send`."""

    def __init__(self, deadline_seconds: float | None, send: Callable[[dict[str, Any]], None]) -> None:
        self._deadline, self.send = deadline_seconds, send
        self._told: set[tuple[str, str]] = set()

    def add(self, severity: Severity, found: str, expected: str, remedy: str) -> None:
        """Sends a problem once, however often it occurs."""
        if (key := (expected, found if expected == _NO_WARNING else remedy)) not in self._told:
            self._told.add(key)
            self.send({"problem": asdict(Problem(severity, found, expected, remedy))})

    def fatal(self, found: str, expected: str, remedy: str) -> NoReturn:
        """Sends a problem that prevents further checks; raises `Unsteppable`."""
        self.add(FATAL, found, expected, remedy)
        raise Unsteppable

    def raised(self, what: str, error: BaseException) -> NoReturn:
        frames = traceback.extract_tb(error.__traceback__)
        if isinstance(error, EnvironmentUnusable):  # our own, which says what is wrong and what to do
            self.send({"error": type(error).__name__, "text": str(error)})
            raise Unsteppable from None
        mine = [frame for frame in frames if Path(frame.filename).parent != _HERE] or list(frames)
        raised = f"{type(error).__name__}: {' '.join(str(error).split())} (at {mine[-1].filename}:{mine[-1].lineno})"
        self.add(RAISED, f"{what} raised {raised}", "no exception", "mend the environment")
        raise Unsteppable from None

    def calling(self, what: str, call: Callable[[], Any]) -> Any:
        """Makes one call with its name and deadline; warnings of Gymnasium's own checkers become notes."""
        self.send({"doing": what})
        if self._deadline is not None:  # else in the caller's own process
            faulthandler.dump_traceback_later(self._deadline, exit=True)
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always", UserWarning)
                return call()
        finally:
            if self._deadline is not None:
                faulthandler.cancel_dump_traceback_later()
            for item in said:
                if issubclass(item.category, UserWarning):
                    text = " ".join(str(item.message).split()).removeprefix("\x1b[33mWARN:").removesuffix("\x1b[0m")
                    self.add(NOTE, f"{what} warns: {text.strip()}", _NO_WARNING, "see to it")

    def guarded(self, what: str, call: Callable[[], Any]) -> Any:
        """Makes a call as `calling` does; an exception is reported and ends the trial."""
        try:
            return self.calling(what, call)
        except (Exception, SystemExit) as error:
            self.raised(what, error)
