"""Child processes that end with their parent, also when that is killed."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals) -> Callable[[], object]:
    """To be called in the child: on Linux the kernel then sends it this signal when the thread that started it ends.

    What can fail (or hang, in a child that was forked beside other threads) is done here, in the parent.
    """
    if not sys.platform.startswith("linux"):
        return lambda: None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
