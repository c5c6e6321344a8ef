"""How the process of a role hears that it shall go: SIGTERM (its machine is taken away) or Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LEFT = "left"
"""How the life of a role ends that was asked to leave; its place is to be filled by a new process."""
_DEFAULT = (signal.SIGTERM,)


@contextmanager
def leaves_on_signal(
    ask_to_leave: Callable[[], None],
    grace_seconds: float | None = None,
    numbers: tuple[signal.Signals, ...] = _DEFAULT,
) -> Iterator[None]:
    """The first signal calls `ask_to_leave`; a second one, or the end of the grace, raises `KeyboardInterrupt`.

    Python runs this between two instructions of the main thread, so call it there. Afterwards the handlers are the
    former ones.
    """
    received = False

    def on_signal(number: int, _: Any) -> None:
        nonlocal received
        if received or number == signal.SIGALRM:
            raise KeyboardInterrupt
        received = True
        if grace_seconds is not None:
            signal.setitimer(signal.ITIMER_REAL, grace_seconds)
        ask_to_leave()

    before = {number: signal.signal(number, on_signal) for number in (*numbers, signal.SIGALRM)}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in before.items():
            signal.signal(number, handler)
