"""Waits for what other threads and processes do, and calls that run beside a test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tests.support.speed import stretched

Result = TypeVar("Result")


def eventually(done: Callable[[], Result], seconds: float = 60.0) -> Result:
    """What `done()` returns, once that is true; fails after `seconds` of a quiet machine."""
    deadline = time.monotonic() + stretched(seconds)
    while not (found := done()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return found


class Background:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._answer: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._answer = self._call()
        except BaseException as error:
            self._error = error

    @property
    def runs(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> Any:
        """Waits for what it returns; raises what it raised."""
        self._thread.join(stretched(60.0))
        assert not self.runs
        if self._error is not None:
            raise self._error
        return self._answer


@contextmanager
def meanwhile(act: Callable[[], Any]) -> Iterator[None]:
    """`act` happens in another thread while the body runs; what it raises is raised at the end."""
    running = Background(act)
    yield
    running.result()
