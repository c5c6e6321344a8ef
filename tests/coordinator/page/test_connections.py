"""Connections that send nothing: they neither keep others out nor take the descriptors that a run needs."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from stagecoach.coordinator.page import connections
from stagecoach.coordinator.page.server import serve
from tests.support.processes.command_line import CommandLine
from tests.support.processes.page import TOKEN, Visitor, soon
from tests.support.suite.speed import stretched

pytestmark = pytest.mark.timeout(180)


@contextlib.contextmanager
def connected(url: str, number: int) -> Iterator[list[socket.socket]]:
    """Sockets that send nothing."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=stretched(30)))
            for _ in range(number)
        ]


def open_ones(sockets: list[socket.socket]) -> list[socket.socket]:
    """Those that the server has not closed."""
    found = []
    for each in sockets:
        each.setblocking(False)
        try:
            if each.recv(1):
                found.append(each)
        except BlockingIOError:
            found.append(each)
        except OSError:
            pass
    return found


def test_silent_connections_over_the_limit_are_closed(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_MOST", 12)
    with serve(runs_dir, TOKEN) as url, connected(url, 60) as silent:
        assert Visitor(url).ask("/api/page").status == 200
        soon("the end of the others", lambda: len(open_ones(silent)) <= 12)


def test_connection_without_a_whole_request_is_closed(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that sends a byte of it now and then; a stream of updates stays open."""
    monkeypatch.setattr(connections, "_REQUEST_SECONDS", 0.5)
    with serve(runs_dir, TOKEN) as url, connected(url, 2) as (silent, slow), Visitor(url).updates("a") as updates:

        def closed() -> bool:
            with contextlib.suppress(OSError):
                slow.send(b"G")
            return not open_ones([silent, slow])

        soon("the end of both", closed)
        time.sleep(1.5)
        assert updates.readline() and updates.readline() and updates.fp is not None
        assert Visitor(url).ask("/api/page").status == 200


def test_order_whose_body_does_not_come_is_refused(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagecoach.coordinator.page.server._BODY_SECONDS", 0.2)
    with serve(runs_dir, TOKEN) as url, contextlib.closing(Visitor(url).connect()) as connection:
        connection.putrequest("POST", "/api/runs/a/stop")
        connection.putheader("Authorization", f"Bearer {TOKEN}")
        connection.putheader("Content-Length", "100")
        connection.endheaders()
        assert connection.getresponse().status == 408


def test_failed_page_server_is_started_again(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "_AGAIN_SECONDS", 0.1)
    failures, startup = iter(range(2)), uvicorn.Server.startup

    async def failing(server: uvicorn.Server, sockets: Any) -> None:
        if next(failures, None) is not None:
            raise OSError(24, "Too many open files")
        await startup(server, sockets)

    monkeypatch.setattr(uvicorn.Server, "startup", failing)
    with serve(runs_dir, TOKEN) as url:
        assert Visitor(url).ask("/api/page").status == 200
    assert sum("the page's server failed" in text for text in caplog.messages) == 1
    assert not any(thread.name == "page" for thread in threading.enumerate())


@pytest.mark.processes
def test_run_outlives_more_connections_than_it_may_open(terminal: CommandLine) -> None:
    config = terminal.write_config(stop_at={"updates": 100_000})
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    process = terminal.start("train", config, "--run-id", "a", "--inline", "--page")
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (256, hard))
    terminal.wait_until("the page's URL", lambda: "page: http" in terminal.output(process))
    url = terminal.output(process).partition("page: ")[2].partition("/runs/")[0]
    with connected(url, 306):
        before = terminal.until("a", "an update", lambda status: status.version > 0).version
        terminal.until("a", "progress beside silent connections", lambda status: status.version > before + 5)
        assert Visitor(url, {}).ask("/api/page").status == 401
    stopped: Any = terminal.run("stop", "a")
    assert stopped.code == 0 and terminal.ended(process).code == 0
