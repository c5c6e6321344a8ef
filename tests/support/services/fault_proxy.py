"""A network that fails on demand: a TCP proxy in front of any server, whose faults are switched while it runs.

Clients are given the proxy's port instead of the server's. It runs in a thread of its own, on loopback. Every switch
has taken effect when its call returns. Byte counts and jitter are fixed by arguments and a seed; only the network's own
timing is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

_CHUNK = 65536
_HELD_CHUNKS = 16
"""Chunks that one direction of a connection may hold back; beyond, the sender's buffers fill, as on a real network."""
_SLICES_A_SECOND = 20
_SWITCH_SECONDS = 10.0


@dataclass
class _Cut:
    """The next connection that sends `request` is reset after so many bytes, of the request or of its reply."""

    after: int
    of_reply: bool
    request: bytes


@dataclass(eq=False)
class _Link:
    client: asyncio.StreamWriter
    server: asyncio.StreamWriter | None = None
    cut: _Cut | None = None
    """A cut that this link has drawn: its request has been seen."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def reset(self) -> None:
        """Both ends see the connection reset, at once, whatever was still on its way."""
        for writer in (self.client, self.server):
            if writer is not None:
                with contextlib.suppress(OSError):
                    found: socket.socket = writer.get_extra_info("socket")
                    found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
        for task in self.tasks:
            if task is not asyncio.current_task():
                task.cancel()


class FaultProxy:
    """Passes everything until it is told otherwise; `heal` ends every fault."""

    def __init__(self, port: int) -> None:
        self._upstream = port
        self._random = random.Random(0)
        self._links: set[_Link] = set()
        self._latency, self._jitter = 0.0, 0.0
        self._bytes_a_second: float | None = None
        self._refusing = False
        self._cut: _Cut | None = None
        self.cuts = 0
        """Connections that the proxy has reset so far, those that it refused included."""
        self._loop = asyncio.new_event_loop()
        self._passing = asyncio.Event()
        self._passing.set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._thread.start()
        starting = asyncio.start_server(self._accept, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result(_SWITCH_SECONDS)
        self.port: int = self._server.sockets[0].getsockname()[1]

    # Faults

    def heal(self) -> None:
        self._switch(_latency=0.0, _jitter=0.0, _bytes_a_second=None, _refusing=False, _cut=None)
        self._run(self._passing.set)

    def delay(self, seconds: float, jitter: float = 0.0) -> None:
        """Each way takes `seconds`, and up to `jitter` more; nothing is overtaken."""
        self._switch(_latency=seconds, _jitter=jitter)

    def throttle(self, bytes_a_second: float) -> None:
        self._switch(_bytes_a_second=bytes_a_second)

    def cut(self) -> None:
        self._run(self._reset_all)

    def refuse(self) -> None:
        """Resets all connections, and new ones as soon as they come: a server that is down."""
        self._switch(_refusing=True)
        self.cut()

    def black_hole(self) -> None:
        """Half-open: connections are accepted and stay, and nothing gets through in either direction."""
        self._run(self._passing.clear)

    def cut_reply(self, after: int, request: bytes = b"") -> None:
        """Serves the next request that contains `request`, but resets after `after` bytes of its reply."""
        self._switch(_cut=_Cut(after, True, request))

    def cut_request(self, after: int, request: bytes = b"") -> None:
        """Resets after `after` bytes of the next request that contains `request`."""
        self._switch(_cut=_Cut(after, False, request))

    def retarget(self, port: int) -> None:
        """Failover: all connections are reset, new ones lead to another server."""
        self._switch(_upstream=port)
        self.cut()

    @property
    def armed(self) -> bool:
        return self._cut is not None

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self.cut()

        async def end() -> None:
            self._server.close()
            while others := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in others:
                    task.cancel()
                await asyncio.gather(*others, return_exceptions=True)
                await asyncio.sleep(0.01)  # for sockets to close, and for the tasks of those just accepted to begin

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(_SWITCH_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_SWITCH_SECONDS)
        self._loop.close()

    # Inside the proxy's thread

    def _run(self, switch: Callable[[], object]) -> None:
        """Calls `switch` there, and waits until it is done."""

        async def call() -> None:
            switch()

        asyncio.run_coroutine_threadsafe(call(), self._loop).result(_SWITCH_SECONDS)

    def _switch(self, **fields: object) -> None:
        self._run(lambda: vars(self).update(fields))

    def _reset_all(self) -> None:
        for link in list(self._links):
            self._reset(link)

    def _reset(self, link: _Link) -> None:
        self.cuts += 1
        self._links.discard(link)
        link.reset()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = _Link(writer)
        self._links.add(link)
        own = asyncio.current_task()
        assert own is not None
        link.tasks.append(own)
        if self._refusing:
            self._reset(link)
            return
        try:
            await self._passing.wait()
            from_server, link.server = await asyncio.open_connection("127.0.0.1", self._upstream)
            ways = [self._way(link, reader, link.server, False), self._way(link, from_server, writer, True)]
            await asyncio.gather(*ways)
        except asyncio.CancelledError:
            return  # reset meanwhile
        except OSError:
            link.reset()
        finally:
            self._links.discard(link)
            for end in (link.client, link.server):
                if end is not None:
                    end.close()

    async def _way(self, link: _Link, source: asyncio.StreamReader, to: asyncio.StreamWriter, replies: bool) -> None:
        """One direction of one connection: what comes in is delivered in order, each piece when it is due."""
        held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_HELD_CHUNKS)
        delivery = asyncio.create_task(self._deliver(link, held, to, replies))
        link.tasks.append(delivery)
        data = b"more"
        while data:
            data = await source.read(_CHUNK)
            due = self._loop.time() + self._latency + self._random.uniform(0.0, self._jitter)
            await held.put((due, data))
        await delivery

    async def _deliver(
        self, link: _Link, held: asyncio.Queue[tuple[float, bytes]], to: asyncio.StreamWriter, replies: bool
    ) -> None:
        while True:
            due, data = await held.get()
            await asyncio.sleep(max(0.0, due - self._loop.time()))
            await self._passing.wait()
            if not data:
                to.write_eof()
                return
            if not replies and self._cut is not None and self._cut.request in data:
                link.cut, self._cut = self._cut, None
            if link.cut is not None and link.cut.of_reply is replies:
                data = data[: link.cut.after]
                link.cut.after -= len(data)
                await self._write(to, data)
                if link.cut.after <= 0:
                    await asyncio.sleep(0.01)  # what has passed shall arrive: a reset overtakes it
                    self._reset(link)
                    return
            else:
                await self._write(to, data)

    async def _write(self, to: asyncio.StreamWriter, data: bytes) -> None:
        while data and self._bytes_a_second is not None:
            size = max(1, int(self._bytes_a_second / _SLICES_A_SECOND))
            to.write(data[:size])
            await to.drain()
            await asyncio.sleep(min(size, len(data)) / self._bytes_a_second)
            data = data[size:]
        to.write(data)
        await to.drain()
