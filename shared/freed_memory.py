"""Memory that was freed stays with the process, for the next large arrays.

By default glibc asks the kernel for each large array anew and gives it back when it is freed. The kernel then clears
every page of the next one as it is touched, which takes several times as long as the copying itself: weights, optimiser
states, gradients and blobs of the same few sizes come and go at each update and each checkpoint.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST = 32 << 20
"""Bytes: glibc lets no larger array be taken from what it keeps."""
_KEPT = 512 << 20
"""Bytes that may lie unused at the end of the heap; beyond it they are given back."""


def keep_freed_memory() -> bool:
    """Tells this process's allocator; False where it is not glibc's."""
    if not sys.platform.startswith("linux"):
        return False
    with contextlib.suppress(OSError, AttributeError):  # musl has no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST) and mallopt(_M_TRIM_THRESHOLD, _KEPT))
    return False
