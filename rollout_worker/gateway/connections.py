"""Connections of a gateway: uvicorn's, within bounds that it does not have. In private names of uvicorn 0.54."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

MOST_CONNECTIONS = 2000
_REQUEST_SECONDS = 10.0
"""Deadline of a request."""
_MOST_UNREAD = 1 << 20
"""Bytes of answers that a client has not read, beyond which its pings are not answered: it is cut."""
_AHEAD, _SHORT = 64, 4096
"""Messages that are read ahead, and how long they may be: to pause and resume for each costs more than to read it."""

_CHUNK, _MOST_FRAMES = 1 << 15, 10_000
"""Bytes that are read from a connection at a time, and frames of a message, which may be empty."""


def most_connections() -> int:
    """Returns how many connections a gateway takes: half of the files that this process may open, at most."""
    return min(MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


class HttpConnection(H11Protocol):
    """A connection before it is a WebSocket; the oldest of these gives way when there are too many."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = _CHUNK  # type: ignore[attr-defined]
        self.made_at = self.loop.time()
        if len(self.connections) > most_connections():
            waiting = [its for its in self.connections if isinstance(its, HttpConnection)]
            min(waiting, key=lambda its: its.made_at).transport.abort()
        self._deadline = self.loop.call_later(_REQUEST_SECONDS, self._expire)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()  # else it keeps what was read from the connection
        super().connection_lost(exc)

    def _expire(self) -> None:
        if self.cycle is None and self.transport.get_protocol() is self:
            self.transport.abort()


class PlayConnection(WebSocketsSansIOProtocol):
    """A WebSocket whose client cannot make the gateway store what it does not read, and that reads messages ahead."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.max_size = _CHUNK
        self._paused = False  # since the last ping was sent, or its pong waited for

    def handle_cont(self, event: Any) -> None:
        if len(self.frames) < _MOST_FRAMES:
            super().handle_cont(event)
        else:
            self.transport.abort()

    def handle_ping(self) -> None:
        if self.transport.get_write_buffer_size() > _MOST_UNREAD:
            self.transport.abort()
        else:
            super().handle_ping()

    def send_receive_event_to_app(self) -> None:
        paused, self.read_paused = self.read_paused, True  # so that it is not paused here
        long = sum(map(len, self.frames)) > _SHORT
        super().send_receive_event_to_app()
        self.read_paused = paused
        if not paused and not self.close_sent and (long or self.queue.qsize() >= _AHEAD):
            self.read_paused = self._paused = True
            self.transport.pause_reading()

    def keepalive_timeout(self) -> None:
        """Waits on for a pong that may be behind messages that the gateway has not read yet."""
        if self._paused and self.writable.is_set():
            self._paused = self.read_paused
            self.pong_timer = self.loop.call_later(self.ping_timeout or 0.0, self.keepalive_timeout)
        else:
            super().keepalive_timeout()


def bounded() -> dict[str, Any]:
    """Returns the arguments of `uvicorn.Config` for these connections; what a client does wrong is not logged."""
    return {"http": HttpConnection, "ws": PlayConnection, "log_level": "critical"}
