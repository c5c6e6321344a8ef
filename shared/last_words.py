"""What a process says on its standard error as it ends of itself, and what can be made of it afterwards.

Whoever started it cannot always ask the kernel how it ended (Ray lets its processes' exit codes go). A crash is told by
the fault handlers of Python and Ray; an `os._exit`, which runs no handler at all, tells here who called it.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from dataclasses import dataclass
from typing import NoReturn

_LINES, _LONGEST = 6, 1500
_NOISE = re.compile(r"^(:\w+:.*|\[.* logging\.cc:\d+:.*|\s*@ .*|PC: @.*|Extension modules: .*|)$")
"""Ray's marks, and native frames without names."""
_EXITED = re.compile(r"^os\._exit\((-?\d+)\) ends this process", re.MULTILINE)
_SIGNAL = re.compile(r"^\*\*\* (SIG[A-Z]+) received", re.MULTILINE)
_FATAL = "Fatal Python error: "
_SIGNALS = {
    "Segmentation fault": "SIGSEGV", "Aborted": "SIGABRT", "Bus error": "SIGBUS", "Floating point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}  # fmt: skip


@dataclass(frozen=True)
class LastWords:
    """How a process ended of itself, and the end of its standard error."""

    how: str | None
    """`exit code 3`, `SIGSEGV`; None where it did not say: it was killed, or native code ended it."""
    lines: tuple[str, ...]


def tell_of_exits() -> None:
    """From now on an `os._exit` of this process (not of one that it forks) says who called it."""
    end, own = os._exit, os.getpid()

    def exit_and_tell(status: int) -> NoReturn:
        if os.getpid() == own:
            frames = "".join(traceback.format_stack(sys._getframe(1), limit=_LINES // 2))
            print(f"os._exit({status}) ends this process, called from\n{frames}", file=sys.stderr, flush=True)
        end(status)

    os._exit = exit_and_tell


def last_words(said: str) -> LastWords:
    """From the end of a standard error; of a crash the innermost frames, which name what has crashed."""
    exited, signals, (_, fatal, crash) = _EXITED.findall(said), _SIGNAL.findall(said), said.rpartition(_FATAL)
    lines = [line.rstrip() for line in said.splitlines() if not _NOISE.match(line)][-_LINES:]
    if fatal:
        lines = [line.rstrip() for line in (fatal + crash).splitlines() if not _NOISE.match(line)][:_LINES]
    named = next((name for words, name in _SIGNALS.items() if crash.startswith(words)), None) if fatal else None
    how = next(iter(signals[-1:]), named) or (f"exit code {exited[-1]}" if exited else None)
    return LastWords(how, tuple(line[: _LONGEST // _LINES] for line in lines))
