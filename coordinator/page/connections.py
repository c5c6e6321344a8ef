"""Limits on the page's connections: their number, and the time without a request.

The page may share the coordinator's process, whose file descriptors the run needs. uvicorn limits neither.
"""

import asyncio
import logging
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from stagecoach.shared.base import world

_LOGGER = logging.getLogger("stagecoach.coordinator")
_MOST, _SHARE = 200, 4
"""Maximum number of connections, and their share (1/N) of the process's file descriptors."""
_BACKLOG = 8
"""Connections accepted in one turn of the event loop, before any of them can be closed."""
_REQUEST_SECONDS = 10.0
_AGAIN_SECONDS = 1.0


class Connection(H11Protocol):
    """Closes if no request arrives in time; a connection over the limit replaces the one idle for longest."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._opened, self._served = self.loop.time(), self.cycle
        self.loop.call_later(_REQUEST_SECONDS, self._close_if_idle)
        if len(self.connections) > _limit():
            others = [its for its in self.connections if isinstance(its, Connection) and its.idle]
            oldest = min(others, key=lambda its: its._opened, default=self)
            oldest.connections.discard(oldest)
            oldest.transport.abort()

    @property
    def idle(self) -> bool:
        """True while no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _close_if_idle(self) -> None:
        if self.transport.is_closing():
            return
        if self.idle and self.cycle is self._served:
            self.transport.abort()
            return
        self._served = self.cycle
        self.loop.call_later(_REQUEST_SECONDS, self._close_if_idle)


def _limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(_BACKLOG, min(_MOST, soft // _SHARE))


@contextmanager
def serving(application: ASGIApp, listener: socket.socket) -> Iterator[None]:
    """Answers at `listener` in a thread while the context lasts; a failed server is replaced, and reported once."""
    config = uvicorn.Config(
        application, loop="asyncio", http=Connection, ws="none", lifespan="off", log_config=None, log_level="error",
        access_log=False, server_header=False, proxy_headers=False, timeout_graceful_shutdown=3, backlog=_BACKLOG,
    )  # fmt: skip
    closed, servers = world.Event(), [uvicorn.Server(config)]

    def serve() -> None:
        while not closed.is_set():
            try:
                with listener.dup() as own:  # the server closes it
                    servers[-1].run([own])
            except Exception:
                if len(servers) == 1:
                    _LOGGER.exception("the page's server failed; it is restarted each time")
                servers[1:] = [uvicorn.Server(config)]
                closed.wait(_AGAIN_SECONDS)

    thread = world.Thread(target=serve, name="page", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed.set()
        servers[-1].should_exit = True
        thread.join()
