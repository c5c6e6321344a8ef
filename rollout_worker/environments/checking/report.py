"""Report of an environment trial: each problem once, each call with its name and a deadline, and checks of values."""

import faulthandler
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from gymnasium import spaces

from stagecoach.shared.base.errors import EnvironmentUnusable
from stagecoach.shared.experience.fragment import LARGEST

_NO_WARNING = "no warning"
_HERE = Path(__file__).parent


class Severity(StrEnum):
    FATAL = "fatal"
    """A run cannot learn in the environment."""
    RAISED = "raised"
    """Exception, of which `environment.failures_allowed` tolerates some."""
    WRONG = "wrong"
    NOTE = "note"


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


_LARGEST = f"numbers up to {LARGEST:g}, beyond which nothing is learned"


def check_outcome(report: Report, whose: str, reward: Any, terminated: Any, truncated: Any) -> bool:
    """Checks the reward and both flags of one agent; returns whether its episode is over."""
    told = f"step() returned {shown(reward)} as reward{whose}"
    try:
        number = float(reward.item() if isinstance(reward, np.ndarray) else reward)
    except (TypeError, ValueError):
        report.add(FATAL, told, "a number", "return a float")
    else:
        found = f"step() returned {number:g} as reward{whose}"
        if not np.isfinite(number):
            report.add(FATAL, found, "a finite number", "look for a division by zero")
        elif abs(number) > LARGEST:
            report.add(FATAL, found, _LARGEST, "scale it down")
        if np.ndim(reward):
            report.add(NOTE, told, "a number (it is taken for one here)", "return float(reward)")
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, bool | np.bool_):
            usable = isinstance(flag, int | np.integer) or (isinstance(flag, np.ndarray) and flag.size == 1)
            found = f"step() returned {shown(flag)} as {name}{whose}"
            report.add(WRONG if usable else FATAL, found, "a bool", f"return bool({name})")
    return bool(np.any(terminated)) or bool(np.any(truncated))


def check_value(report: Report, what: str, value: Any, space: spaces.Space[Any]) -> None:
    """Reports a value that does not fit its space: structure, shape, dtype, NaN, bounds."""
    told, expected = f"{what}, {shown(value)}", f"shape {space.shape} and dtype {space.dtype}"
    remedy = "return what the space says, or correct observation_space"
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = dict(space.spaces) if isinstance(space, spaces.Dict) else dict(enumerate(space.spaces))
        given = dict(enumerate(value)) if isinstance(value, tuple | list) else value
        if not isinstance(given, Mapping) or set(given) != set(parts):
            keys = sorted(map(str, given)) if isinstance(given, Mapping) else shown(value)
            report.add(FATAL, f"{what} with {keys}", f"{sorted(map(str, parts))}", remedy)
            return
        for name, part in parts.items():
            check_value(report, f"{what} ({name})", given[name], part)
        return
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.asarray(None)
    bounded = array.dtype.kind in "buif" and array.size
    span = f"{what} from {float(array.min()):.6g} to {float(array.max()):.6g}" if bounded else ""
    if array.dtype.kind not in "buif":
        report.fatal(told, expected, remedy)
    elif array.shape != space.shape:
        report.add(FATAL, told, expected, remedy)
    elif array.dtype.kind == "f" and not np.isfinite(array).all():
        report.add(FATAL, f"{what} with NaN or infinity", "finite numbers", "look for a division by zero")
    elif bounded and np.abs(array.astype(np.float64)).max() > LARGEST:
        report.add(FATAL, span, _LARGEST, "scale it down")
    elif space.dtype is not None and not np.can_cast(array.dtype, space.dtype, "same_kind"):
        severity = FATAL if isinstance(space, spaces.Box) and array.dtype.kind == "f" else NOTE
        report.add(severity, f"{what} of dtype {array.dtype}", f"{space.dtype}", remedy)
    elif isinstance(space, spaces.Box) and space.dtype is not None:
        if not np.can_cast(array.dtype, space.dtype):
            report.add(NOTE, f"{what} of dtype {array.dtype}", f"{space.dtype} (it is converted)", remedy)
        if (array < space.low).any() or (array > space.high).any():
            bounds = f"numbers within the space's bounds, {space.low.min():.6g} to {space.high.max():.6g}"
            report.add(WRONG, span, bounds, remedy)
    elif not space.contains(value) and not space.contains(array.astype(space.dtype)):
        report.add(FATAL, told, f"one of {space}", remedy)


def shown(value: Any) -> str:
    if isinstance(value, np.ndarray | np.generic):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "None" if value is None else f"{type(value).__name__} {repr(value)[:60]}"
