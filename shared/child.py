"""Child processes: started whole or not at all, ended with their parent (also when that is killed), and without the
secrets of others in their environment."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Literal

_PR_SET_PDEATHSIG = 1
Secrets = Literal["redis", "store", "ray"]
"""Whose secrets an environment may hold."""
_SECRETS: dict[Secrets, re.Pattern[str]] = {
    "redis": re.compile(r"STAGECOACH_(\w+_)?REDIS_(PASSWORD|USERNAME)(_FILE)?"),
    "store": re.compile(r"AWS_\w+|RCLONE_\w+"),
    "ray": re.compile(r"RAY_AUTH_\w+"),
}
_OWN = {"RAY_RAYLET_PID"}
"""Says something of this process alone."""


@contextlib.contextmanager
def signals_after() -> Iterator[None]:
    """SIGINT and SIGTERM come when this is over: in the midst of starting a process they would leave it to nobody."""
    mine = threading.current_thread() is threading.main_thread()  # no other thread hears of signals
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if mine and signal.getsignal(n) is not None]
    came: list[int] = []
    handlers = {number: signal.signal(number, lambda it, _: came.append(it)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for again in came:
            signal.raise_signal(again)


def end_with_parent(number: signal.Signals) -> Callable[[], object]:
    """To be called in the child: on Linux the kernel then sends it this signal when the thread that started it ends.

    What can fail (or hang, in a child that was forked beside other threads) is done here, in the parent.
    """
    if not sys.platform.startswith("linux"):
        return lambda: None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def child_environment(*needs: Secrets, **given: str) -> dict[str, str]:
    """This process's environment for a child: without secrets, but for those that it needs; and what it is given."""
    hidden = [pattern for kind, pattern in _SECRETS.items() if kind not in needs]
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _OWN and not any(pattern.fullmatch(name) for pattern in hidden)
    }
    return kept | given


def forget_secrets(*kept: Secrets) -> None:
    """For a child that was started by others' means: what it starts itself does not inherit them."""
    for name in os.environ.keys() - child_environment(*kept).keys():
        del os.environ[name]
