"""Python's garbage collector, and the imports of a process that begins.

What is imported stays. While PyTorch's hundreds of thousands of objects come, the collector looks through all that is
there again and again, which is a fifth of a role's start; and later each of its full looks would stop the process.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
