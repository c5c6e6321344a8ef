"""Child processes: started whole or not at all, and ended with their parent, also when that is killed."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys
import threading
from collections.abc import Callable, Iterator

_PR_SET_PDEATHSIG = 1


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
