"""A station: a process of its own that holds one object, and calls its methods when it is told to."""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

_READY_SECONDS = 120.0


class StationFailed(RuntimeError):
    """What was called raised something, or the process is gone."""


class Station:
    """One call at a time: `begin` sends it, `answer` waits for what it answers."""

    def __init__(self, make: Callable[..., object], *arguments: Any) -> None:
        """`make(*arguments)` is called there; it is at module level, so that the process finds it."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()
        self.answer(_READY_SECONDS)

    @property
    def pid(self) -> int:
        """Of its process."""
        return int(self._process.pid or 0)

    def begin(self, method: str, *arguments: Any) -> None:
        """Answers at once; the process works."""
        self._pipe.send((method, arguments))

    def answer(self, seconds: float = 120.0) -> Any:
        """Of the call that was begun; raises `StationFailed`."""
        try:
            if not self._pipe.poll(seconds):
                raise StationFailed(f"a process of the benchmark does not answer within {seconds:g} s")
            good, value = self._pipe.recv()
        except EOFError:
            raise StationFailed("a process of the benchmark has ended without an answer") from None
        if not good:
            raise StationFailed(f"a process of the benchmark failed:\n{value}")
        return value

    def call(self, method: str, *arguments: Any, seconds: float = 120.0) -> Any:
        """`begin` and `answer`."""
        self.begin(method, *arguments)
        return self.answer(seconds)

    def close(self) -> None:
        """Ends the process."""
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe: Connection, make: Callable[..., object], arguments: Sequence[Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent ends it
    try:
        thing = make(*arguments)
        pipe.send((True, None))
        while True:
            method, given = pipe.recv()
            pipe.send((True, getattr(thing, method)(*given)))
    except EOFError:
        return
    except Exception as error:
        said = str(error) if isinstance(error, ConnectionError) else traceback.format_exc()
        with suppress(OSError):  # the reader has ended
            pipe.send((False, said))
