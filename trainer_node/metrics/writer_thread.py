"""A metric writer in a thread of its own, so that one which is slow, or hangs, holds up no other."""

import queue
from collections.abc import Callable
from typing import Any

from stagecoach.shared.base import world
from stagecoach.shared.base.printable import counted


class WriterThread:
    """Opens a writer and passes calls on in order; reports what it raises by `failed`."""

    def __init__(
        self, name: str, opens: Callable[[], Any], failed: Callable[[str, str], None], slow: Callable[[str, str], None],
        most: int,
    ) -> None:  # fmt: skip
        """`failed` and `slow` take the writer's name and why; `most` calls wait for it, more are left out."""
        self.name, self._opens, self._failed, self._slow = name, opens, failed, slow
        self._queue: world.Queue[tuple[str, tuple[Any, ...]]] = world.Queue(most)
        self._flushed, self._overdue = world.Event(), False
        self._flushed.set()
        self._thread = world.Thread(target=self._run, name=f"metrics: {name}", daemon=True)
        self._thread.start()

    def put(self, method: str, *arguments: Any) -> bool:
        """Calls a method of the writer, later; whether it will be."""
        try:
            self._queue.put_nowait((method, arguments))
        except queue.Full:
            self._failed(self.name, f"{self._queue.maxsize} rows wait for it; the newest are left out")
            return False
        return True

    def flush(self) -> None:
        """Flushes buffered rows."""
        self._overdue = not self._flushed.is_set()
        self.put("flush")
        if not self._overdue and self.put("flushed", flushed := world.Event()):
            self._flushed = flushed

    def wait_flushed(self, until: float) -> None:
        """Waits for the last `flush` until then (monotonic clock); not for one that was late before and still is."""
        if not self._overdue and not self._flushed.wait(max(0.0, until - world.monotonic())):
            self._slow(self.name, "it is still busy; checkpoints and other writers go ahead")

    def join(self, seconds: float) -> None:
        """Waits for its end after `close` was put; reports the calls that are still queued."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            left = counted(self._queue.qsize(), "call")
            self._slow(self.name, f"{left} to it are still waiting as the trainer ends; their rows are in the store")

    def _run(self) -> None:
        writer = self._try(self._opens)
        method = ""
        while method != "close":
            method, arguments = self._queue.get()
            if method == "flushed":
                arguments[0].set()
            elif writer is not None:
                self._try(getattr(writer, method), *arguments)

    def _try(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except (Exception, SystemExit) as error:  # whatever it is, no metric is worth a run
            self._failed(self.name, f"{type(error).__name__}: {error}")
            return None
