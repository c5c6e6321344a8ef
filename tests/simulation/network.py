"""Connections between simulated processes and a simulated Redis, under redis-py's own client.

A connection keeps the order of what it carries; between connections the scheduler decides. What was sent arrives
although its sender has been killed, or has given up; what is answered may be lost.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import hiredis
import pytest
import redis._parsers.hiredis
import redis.connection

from tests.simulation.redis_model import RedisModel, Refused, Status
from tests.simulation.scheduler import Killed, Scheduler, Task


def encode(reply: Any) -> bytes:
    """Returns a reply as Redis sends it to a client that speaks RESP 3."""
    if reply is None:
        return b"_\r\n"
    if isinstance(reply, dict):
        return b"%%%d\r\n%b" % (len(reply), b"".join(encode(part) for pair in reply.items() for part in pair))
    if isinstance(reply, Refused):
        return b"-" + str(reply).encode() + b"\r\n"
    if isinstance(reply, Status):
        return b"+" + reply + b"\r\n"
    if isinstance(reply, bytes):
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    return b"*%d\r\n%b" % (len(reply), b"".join(map(encode, reply)))


@dataclass
class Delays:
    """Seconds that one way takes, and how often it takes longer, up to so many."""

    usual: float = 0.002
    often: float = 0.005
    longest: float = 1.5


@dataclass
class Server:
    """A Redis that can be reached, and what is wrong with it."""

    scheduler: Scheduler
    model: RedisModel
    delays: Delays = field(default_factory=Delays)
    up: bool = True
    refuses: str = ""
    """An error with which it answers everything, such as `LOADING …`."""
    garbles: float = 0.0
    """Probability that an answer arrives with other bytes."""
    breaks: float = 0.0
    """Probability that a connection breaks before an answer arrives."""
    wires: list[Wire] = field(default_factory=list)
    blocked: list[Wire] = field(default_factory=list)

    def delay(self) -> float:
        draw = self.scheduler.random
        return draw.uniform(0.0, self.delays.longest if draw.random() < self.delays.often else self.delays.usual)

    def execute(self, command: list[bytes]) -> Any:
        if self.refuses:
            return Refused(self.refuses)
        try:
            reply = self.model.call(*command)
            name = command[0].upper()
            if reply is not None and name in (b"HGETALL", b"HELLO"):
                return dict(zip(reply[::2], reply[1::2], strict=True))
            return dict(reply) if reply is not None and name == b"XREAD" else reply
        except Refused as error:
            return error

    def stop(self) -> None:
        """Ends as a process: all its connections break."""
        self.up = False
        for wire in list(self.wires):
            wire.break_off()

    def notice(self) -> None:
        """Answers the reads that wait and whose stream has something now."""
        for wire in list(self.blocked):
            wire.read_again()


class Wire:
    """One connection, as redis-py's socket."""

    def __init__(self, server: Server, timeout: float | None) -> None:
        self.server, self.scheduler, self._timeout = server, server.scheduler, timeout
        self.open = True
        self._reader = hiredis.Reader()
        self._inbox = bytearray()
        self._waiters: list[Task] = []
        self._commands: deque[list[bytes]] = deque()
        self._arrives = self._answered = 0.0
        """When what was sent last arrives, and the last answer."""
        self._deadline: float | None = None
        server.wires.append(self)
        self.process = self.scheduler.current.process if self.scheduler.current is not None else None
        if self.process is not None:
            self.process.connections.append(self.close)

    # The client's side

    def sendall(self, data: bytes) -> None:
        self._check()
        if not self.open:
            raise ConnectionResetError("Connection reset by peer")
        self._reader.feed(bytes(data))
        late = self.process.late if self.process is not None else 0.0
        while (command := self._reader.gets()) is not False:
            self._arrives = max(self._arrives, self.scheduler.now + late + self.server.delay())
            self.scheduler.at(self._arrives, partial(self._arrived, command))

    send = sendall

    def recv_into(self, buffer: Any, size: int = 0, flags: int = 0) -> int:
        self._check()
        if not self._inbox and self._timeout == 0:
            raise BlockingIOError
        there = self.scheduler.wait_until(self._waiters, lambda: self.readable, self._timeout)
        if not there:
            raise TimeoutError("timed out")
        size = min(len(self._inbox), size or len(buffer))
        buffer[:size] = self._inbox[:size]
        del self._inbox[:size]
        return size

    @property
    def readable(self) -> bool:
        return bool(self._inbox) or not self.open

    def recv(self, size: int) -> bytes:
        data = bytearray(size)
        return bytes(data[: self.recv_into(data)])

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds

    def gettimeout(self) -> float | None:
        return self._timeout

    def setsockopt(self, *_: Any) -> None: ...

    def shutdown(self, how: int) -> None: ...

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        """The client's end; what it has sent arrives all the same."""
        self.open = False
        if self in self.server.blocked:
            self.server.blocked.remove(self)
        if self in self.server.wires:
            self.server.wires.remove(self)

    def _check(self) -> None:
        task = self.scheduler.current
        if task is not None and not task.process.alive:
            raise Killed

    # The server's side

    def break_off(self) -> None:
        self.open = False
        self._commands.clear()
        if self in self.server.blocked:
            self.server.blocked.remove(self)
        if self in self.server.wires:
            self.server.wires.remove(self)
        for task in self._waiters:
            self.scheduler.wake(task)

    def _arrived(self, command: list[bytes]) -> None:
        if not self.server.up:
            return
        self._commands.append(command)
        self._work()

    def _work(self) -> None:
        while self._commands and self not in self.server.blocked:
            command = self._commands[0]
            reply = self.server.execute(command)
            block = _block_seconds(command)
            if reply is None and block is not None and self.open:
                self.server.blocked.append(self)
                self._deadline = self.scheduler.now + block
                self.scheduler.at(self._deadline, partial(self._give_up, command))
                return
            self._commands.popleft()
            self._answer(reply)
            if command[0].upper() in (b"EVAL", b"EVALSHA", b"XADD"):
                self.server.notice()

    def read_again(self) -> None:
        reply = self.server.execute(self._commands[0])
        if reply is not None:
            self.server.blocked.remove(self)
            self._commands.popleft()
            self._answer(reply)
            self._work()

    def _give_up(self, command: list[bytes]) -> None:
        if self in self.server.blocked and self._commands and self._commands[0] is command:
            self.server.blocked.remove(self)
            self._commands.popleft()
            self._answer(None)
            self._work()

    def _answer(self, reply: Any) -> None:
        self._answered = max(self._answered, self.scheduler.now + self.server.delay())
        self.scheduler.at(self._answered, partial(self._deliver, encode(reply)))

    def _deliver(self, data: bytes) -> None:
        draw = self.scheduler.random
        own = self.process.breaks if self.process is not None else 0.0
        if draw.random() < max(self.server.breaks, own):
            self.break_off()
        if self.open:
            self._inbox += b"\0" + data[1:] if draw.random() < self.server.garbles else data
            for task in self._waiters:
                self.scheduler.wake(task)


def _block_seconds(command: list[bytes]) -> float | None:
    if command[0].upper() != b"XREAD":
        return None
    for place, word in enumerate(command[:-1]):
        if word.upper() == b"BLOCK":
            return int(command[place + 1]) / 1000
    return None


@contextmanager
def connected(servers: Mapping[str, Server]) -> Iterator[None]:
    """Clients of redis-py connect to these servers, by host or path, while it lasts."""

    def connect(connection: Any) -> Any:
        server = servers.get(getattr(connection, "path", None) or connection.host)
        if server is None:  # of another thread of this process
            return real[type(connection)](connection)
        if not server.up:
            raise ConnectionRefusedError("Connection refused")
        return Wire(server, connection.socket_timeout)

    kinds: Any = redis.connection.Connection, redis.connection.UnixDomainSocketConnection
    real = {kind: kind._connect for kind in kinds}
    parser: Any = redis._parsers.hiredis
    can_read, is_closed = parser._socket_can_read, parser._socket_is_closed

    def readable(to: Any, timeout: float) -> bool:
        return bool(to.readable if isinstance(to, Wire) else can_read(to, timeout))

    with pytest.MonkeyPatch.context() as patch:
        for kind in kinds:
            patch.setattr(kind, "_connect", connect)
        patch.setattr(parser, "_socket_can_read", readable)
        patch.setattr(parser, "_socket_is_closed", lambda to: not to.open if isinstance(to, Wire) else is_closed(to))
        yield


assert socket.timeout is TimeoutError
