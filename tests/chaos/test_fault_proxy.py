"""The fault proxy itself: each fault does what it says, and is over when it is healed."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.chaos.fault_proxy import FaultProxy


class Echo:
    """A server that gives back what it gets, with a mark of its own in front of each line."""

    def __init__(self, mark: bytes) -> None:
        self.mark = mark
        self.heard = b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._held: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._held.append(connection)
            threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        rest = b""
        while True:
            try:
                data = connection.recv(65536)
            except OSError:
                return
            if not data:
                connection.close()
                return
            self.heard += data
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                connection.sendall(self.mark + line + b"\n")

    def close(self) -> None:
        """Ends it."""
        self._listener.close()
        for connection in self._held:
            connection.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo(b"one ")
    yield server
    server.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[FaultProxy]:
    with FaultProxy(echo.port) as found:
        yield found


def connect(proxy: FaultProxy, seconds: float = 5.0) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=seconds)


def receive(client: socket.socket, until: bytes = b"\n") -> bytes:
    """What comes until that, the end, or a reset."""
    found = b""
    while not found.endswith(until):
        try:
            data = client.recv(65536)
        except ConnectionResetError:
            return found + b"<reset>"
        if not data:
            return found + b"<end>"
        found += data
    return found


def ask(client: socket.socket, line: bytes) -> bytes:
    client.sendall(line + b"\n")
    return receive(client)


def test_it_passes_what_comes_in_both_directions_and_the_end_too(proxy: FaultProxy) -> None:
    with connect(proxy) as client:
        assert ask(client, b"hello") == b"one hello\n"
        large = b"x" * 3_000_000
        assert ask(client, large) == b"one " + large + b"\n"
        client.shutdown(socket.SHUT_WR)
        assert receive(client) == b"<end>"
    assert (proxy.accepted, proxy.cuts) == (1, 0)


def test_a_cut_resets_all_connections_and_serves_new_ones(proxy: FaultProxy) -> None:
    with connect(proxy) as one, connect(proxy) as two:
        assert ask(one, b"a") + ask(two, b"b") == b"one a\none b\n"
        proxy.cut()
        assert receive(one) == receive(two) == b"<reset>"
    with connect(proxy) as client:
        assert ask(client, b"again") == b"one again\n"
    assert proxy.cuts == 2


def test_a_server_that_refuses(proxy: FaultProxy) -> None:
    with connect(proxy) as before:
        assert ask(before, b"a") == b"one a\n"
        proxy.refuse()
        assert receive(before) == b"<reset>"
    with contextlib.suppress(ConnectionResetError), connect(proxy) as client:  # the reset may be faster than we are
        assert receive(client) == b"<reset>"
    assert proxy.cuts == 2
    proxy.heal()
    with connect(proxy) as client:
        assert ask(client, b"again") == b"one again\n"


def test_a_black_hole_keeps_old_and_new_connections_and_passes_nothing_until_it_heals(
    proxy: FaultProxy, echo: Echo
) -> None:
    with connect(proxy) as old, connect(proxy) as one:
        assert ask(old, b"a") == b"one a\n"
        assert ask(one, b"b") == b"one b\n"
        proxy.black_hole()
        with connect(proxy) as new:
            for client in (old, new):
                client.sendall(b"held back\n")
                client.settimeout(0.3)
                with pytest.raises(TimeoutError):
                    client.recv(1)
                client.settimeout(5.0)
            assert echo.heard == b"a\nb\n"
            proxy.heal()
            for client in (old, new):
                client.settimeout(5)
                assert receive(client) == b"one held back\n"


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_reply_is_cut_after_so_many_bytes_and_only_that_of_the_request_that_is_meant(
    proxy: FaultProxy, echo: Echo, after: int
) -> None:
    with connect(proxy) as other, connect(proxy) as client:
        assert ask(other, b"a") == b"one a\n"
        proxy.cut_reply(after, b"meant")
        assert ask(other, b"b") == b"one b\n" and proxy.armed
        assert ask(client, b"this is meant") == b"one this is meant\n"[:after] + b"<reset>"
        assert b"this is meant\n" in echo.heard, "the server has done it"
        assert ask(other, b"meant, but late") == b"one meant, but late\n" and not proxy.armed


def test_a_request_is_cut_before_the_server_has_all_of_it(proxy: FaultProxy, echo: Echo) -> None:
    with connect(proxy) as client:
        proxy.cut_request(4, b"never")
        assert ask(client, b"it never arrives") == b"<reset>"
    while echo.heard != b"it n":  # the test's time limit ends this
        time.sleep(0.01)
    with connect(proxy) as client:
        assert ask(client, b"b") == b"one b\n"
    assert echo.heard == b"it nb\n"


def test_a_failover_leads_to_another_server(proxy: FaultProxy) -> None:
    other = Echo(b"two ")
    with connect(proxy) as client:
        assert ask(client, b"a") == b"one a\n"
        proxy.retarget(other.port)
        assert receive(client) == b"<reset>"
    with connect(proxy) as client:
        assert ask(client, b"a") == b"two a\n"
    other.close()


def test_latency_and_throttle_take_at_least_their_time_and_change_no_byte(proxy: FaultProxy) -> None:
    with connect(proxy, 20) as client:
        assert ask(client, b"a") == b"one a\n"
        proxy.delay(0.1, jitter=0.05)
        started = time.monotonic()
        assert ask(client, b"there and back") == b"one there and back\n"
        assert time.monotonic() - started >= 0.2
        proxy.heal()
        proxy.throttle(100_000)
        started = time.monotonic()
        line = bytes(range(11, 256)) * 100
        assert ask(client, line) == b"one " + line + b"\n"
        assert time.monotonic() - started >= 0.2


def test_it_closes_with_connections_open(echo: Echo) -> None:
    proxy = FaultProxy(echo.port)
    with connect(proxy) as client:
        assert ask(client, b"a") == b"one a\n"
        proxy.delay(30)
        client.sendall(b"on its way\n")
        proxy.close()
        assert receive(client) == b"<reset>"
    proxy.close()
