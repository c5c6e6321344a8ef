"""Waits for what other threads and processes do, and calls that run beside a test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from tests.support.suite.speed import stretched

Result = TypeVar("Result")


def eventually(done: Callable[[], Result], seconds: float = 60.0) -> Result:
    """Returns the first true result of `done()`; fails after `seconds` of a quiet machine."""
    deadline = time.monotonic() + stretched(seconds)
    while not (found := done()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return found


class Background:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._future: Future[Any] = Future()
        threading.Thread(target=self._run, args=(call,), daemon=True).start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self._future.set_result(call())
        except BaseException as error:
            self._future.set_exception(error)

    @property
    def runs(self) -> bool:
        return not self._future.done()

    def result(self) -> Any:
        """Waits for what it returns; raises what it raised."""
        return self._future.result(stretched(60.0))


@contextmanager
def meanwhile(act: Callable[[], Any]) -> Iterator[None]:
    """`act` happens in another thread while the body runs; what it raises is raised at the end."""
    running = Background(act)
    yield
    running.result()
