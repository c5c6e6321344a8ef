"""Slowness of this machine relative to a quiet one; the limits of tests stretch with it.

A limit here tells a program that hangs from one that is slow; it is never a promise about speed.
"""

from __future__ import annotations

import os
import statistics
import time

_VARIABLE = "STAGECOACH_TESTS_STRETCH"
_QUIET_SECONDS = 0.0125
"""Duration of one round on the two quiet cores for which the limits were chosen."""
_ROUNDS = 15
_MOST = 4.0


def measure() -> float:
    """Times a fixed computation; returns the factor (1 to 4), which processes that are started from here on inherit."""
    if _VARIABLE not in os.environ:
        seconds = statistics.median(_round() for _ in range(_ROUNDS))
        os.environ[_VARIABLE] = f"{min(max(seconds / _QUIET_SECONDS, 1.0), _MOST):.2f}"
    return float(os.environ[_VARIABLE])


def stretched(seconds: float) -> float:
    """A limit that was chosen on a quiet machine, for this one."""
    return seconds * measure()


def _round() -> float:
    started = time.perf_counter()
    sum(number * number % 7 for number in range(150_000))
    return time.perf_counter() - started
