"""Python's garbage collector, and the imports of a process that begins.

What is imported stays. While PyTorch's hundreds of thousands of objects come, the collector looks through all that is
there again and again, which is a fifth of a role's start; and later each of its full looks would stop the process.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interruptible() -> Iterator[None]:
    """For the imports of a command: as `at_rest`, and Ctrl-C ends the process at once, since nothing has been started
    and some modules would not survive an exception."""
    before = signal.signal(signal.SIGINT, _interrupted)
    try:
        with at_rest():
            yield
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupted(*_: object) -> None:
    os.write(2, b"Interrupted.\n")
    os._exit(130)


@contextmanager
def at_rest() -> Iterator[None]:
    """For the imports of a process of our own: it looks at nothing meanwhile, and never again at what is there then."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
