"""A store that takes its time: an HTTP proxy before an S3 server, which holds every PUT back for some seconds."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import threading
import time
from urllib.parse import urlsplit

_OF_ONE_CONNECTION = {"connection", "keep-alive", "transfer-encoding", "expect"}


class SlowStore:
    """Serves in a thread from the beginning; clients are given `url` as their endpoint."""

    def __init__(self, endpoint: str, put_seconds: float) -> None:
        upstream = urlsplit(endpoint)
        self.upstream = str(upstream.hostname), int(upstream.port or 80)
        self.put_seconds = put_seconds
        self.puts = 0
        self._server = _Server(self)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def count(self) -> int:
        """PUTs so far."""
        return self.puts


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, slow: SlowStore) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.slow = slow


class _Handler(http.server.BaseHTTPRequestHandler):
    """Passes a request on with its headers as they are: its signature covers the Host that the client saw."""

    protocol_version = "HTTP/1.1"
    server: _Server

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.command == "PUT":
            self.server.slow.puts += 1
            time.sleep(self.server.slow.put_seconds)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _OF_ONE_CONNECTION}
        connection = http.client.HTTPConnection(*self.server.slow.upstream, timeout=60)
        try:
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in _OF_ONE_CONNECTION | {"content-length"}:
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(data)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing."""
