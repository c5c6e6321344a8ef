"""What a process says on its standard error as it ends of itself, and what can be made of it afterwards.

Whoever started it cannot always ask the kernel how it ended (Ray lets its processes' exit codes go). A crash is told by
the fault handlers of Python and Ray; an `os._exit`, which runs no handler at all, tells here who called it.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

_LINES, _SAID, _LONGEST = 6, 2, 1500
"""Lines in all, those of them that came before a crash, and characters in all."""
_NOISE = re.compile(r"^(:\w+:.*|\[.* logging\.cc:\d+:.*|\s*@ .*|PC: @.*|\*\*\* SIG.*|Extension modules: .*|)$")
"""Ray's marks, and native frames without names."""
_EXITED = re.compile(r"^os\._exit\((-?\d+)\) ends this process", re.MULTILINE)
_SIGNAL = re.compile(r"^\*\*\* (SIG[A-Z]+) received", re.MULTILINE)
_FATAL = "Fatal Python error: "
_LOCKED = re.compile(r"^Timeout \((\d+:\d\d:\d\d)[.\d]*\)!\n(.*)", re.MULTILINE | re.DOTALL)
_THREAD = re.compile(r"^(?:Current thread|Thread) \w+.*\n", re.MULTILINE)
"""Of a stack that the fault handler writes; the main thread's is the last."""
_SIGNALS = {
    "Segmentation fault": "SIGSEGV", "Aborted": "SIGABRT", "Bus error": "SIGBUS", "Floating point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}  # fmt: skip


@dataclass(frozen=True)
class LastWords:
    """How a process ended of itself, and the end of its standard error."""

    how: str | None
    """`exit code 3`, `SIGSEGV`, a call that kept Python's lock; None where it did not say: it was killed, or native
    code ended it."""
    lines: tuple[str, ...]


def tell_of_exits(last_orders: Callable[[int], int] = lambda status: status) -> Callable[[int], NoReturn]:
    """From now on an `os._exit` of this process (not of one that it forks) says who called it.

    `last_orders` is given the exit code, and returns the one that the process ends with. Returns the former `os._exit`.
    """
    end, own = os._exit, os.getpid()

    def exit_and_tell(status: int) -> NoReturn:
        if os.getpid() == own:
            frames = "".join(traceback.format_stack(sys._getframe(1), limit=_LINES // 2))
            print(f"os._exit({status}) ends this process, called from\n{frames}", file=sys.stderr, flush=True)
            status = last_orders(status)
        end(status)

    os._exit = exit_and_tell
    return end


def last_words(said: str) -> LastWords:
    """From the end of a standard error: what was said before the end, and the innermost frames of a crash or exit."""
    exited, signals, (before, fatal, crash) = _EXITED.findall(said), _SIGNAL.findall(said), said.rpartition(_FATAL)
    lines, locked = _told(said)[-_LINES:], _LOCKED.search(said)
    if locked:
        lines = [*_told(said[: locked.start()])[-_SAID:], *_told(_THREAD.split(locked[2])[-1])[: _LINES - _SAID]]
    elif fatal:
        lines = [*_told(before)[-_SAID:], *_told(fatal + crash)[: _LINES - _SAID]]
    elif exited:
        *_, (start, end) = (found.span() for found in _EXITED.finditer(said))
        lines = [*_told(said[:start])[-_LINES + 2 :], *_told(said[end:].partition("\n")[2])[-2:]]
    named = next((name for words, name in _SIGNALS.items() if crash.startswith(words)), None) if fatal else None
    how = next(iter(signals[-1:]), named) or (f"exit code {exited[-1]}" if exited else None)
    if locked:
        how = f"its watchdog: one call kept Python's lock for {locked[1]}"
    return LastWords(how, tuple(line[: _LONGEST // _LINES] for line in lines))


def _told(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines() if not _NOISE.match(line)]
