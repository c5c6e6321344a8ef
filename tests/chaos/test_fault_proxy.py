"""The fault proxy itself: each fault does what it says, and is over when it is healed."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Iterator

import pytest

from tests.support.fault_proxy import FaultProxy


class Echo(socketserver.ThreadingTCPServer):
    """Gives back what it gets, with a mark of its own in front of each line."""

    daemon_threads, block_on_close = True, False
    heard = b""


class Line(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        echo, rest = self.server, b""
        assert isinstance(echo, Echo)
        with contextlib.suppress(OSError):
            while data := self.request.recv(65536):
                echo.heard += data
                *lines, rest = (rest + data).split(b"\n")
                self.request.sendall(b"".join(b"one " + line + b"\n" for line in lines))


@pytest.fixture
def echo() -> Iterator[Echo]:
    with Echo(("127.0.0.1", 0), Line) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[FaultProxy]:
    with contextlib.closing(FaultProxy(echo.server_address[1])) as found:
        yield found


def connect(proxy: FaultProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=5)


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


def test_black_hole_keeps_connections_until_it_heals(proxy: FaultProxy, echo: Echo) -> None:
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
def test_proxy_cuts_only_the_selected_reply(proxy: FaultProxy, echo: Echo, after: int) -> None:
    with connect(proxy) as other, connect(proxy) as client:
        assert ask(other, b"a") == b"one a\n"
        proxy.cut_reply(after, b"meant")
        assert ask(other, b"b") == b"one b\n" and proxy.armed
        assert ask(client, b"this is meant") == b"one this is meant\n"[:after] + b"<reset>"
        assert b"this is meant\n" in echo.heard, "the server has done it"
        assert ask(other, b"meant, but late") == b"one meant, but late\n" and not proxy.armed


def test_proxy_cuts_a_request_in_the_middle(proxy: FaultProxy, echo: Echo) -> None:
    with connect(proxy) as client:
        proxy.cut_request(4, b"never")
        assert ask(client, b"it never arrives") == b"<reset>"
    while echo.heard != b"it n":  # the test's time limit ends this
        time.sleep(0.01)
    with connect(proxy) as client:
        assert ask(client, b"b") == b"one b\n"
    assert echo.heard == b"it nb\n"
