"""A store that fails on demand: an HTTP proxy before any S3 server, with a fault for the requests that fit a pattern.

Clients are given the proxy's address as their endpoint. A request passes on with its headers as they are, since its
signature covers the Host that the client saw. Faults are switched while the proxy runs, and stay until `heal`.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import formatdate
from urllib.parse import urlsplit

_OF_ONE_CONNECTION = {"connection", "keep-alive", "transfer-encoding", "expect"}


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "application/xml"),)
    length: bool = True
    """True if the reply states its length; else the end of the connection ends the body."""


def refusal(status: int, code: str, message: str = "said by the fault proxy") -> Answer:
    """An error as S3 servers say it."""
    return Answer(status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode())


def clock(seconds: float, now: float) -> Answer:
    """A refusal by a server whose clock is `seconds` ahead of `now`."""
    refused = refusal(403, "RequestTimeTooSkewed")
    return Answer(refused.status, refused.body, (("Date", formatdate(now + seconds, usegmt=True)),))


PAGE = (("Content-Type", "text/html"),)
INTERNAL_ERROR = refusal(500, "InternalError")
SLOW_DOWN = refusal(503, "SlowDown")
REQUEST_TIMEOUT = refusal(400, "RequestTimeout")
EXPIRED = refusal(400, "ExpiredToken")
UNKNOWN_KEY = refusal(403, "InvalidAccessKeyId")
NO_BUCKET = refusal(404, "NoSuchBucket")
REDIRECT = Answer(
    301,
    b"<Error><Code>PermanentRedirect</Code><Message>The bucket you are attempting to access must be addressed using "
    b"the specified endpoint.</Message><Endpoint>b.s3.eu-central-1.amazonaws.com</Endpoint></Error>",
    (("Content-Type", "application/xml"), ("x-amz-bucket-region", "eu-central-1")),
)
WRONG_REGION = Answer(
    400,
    b"<Error><Code>AuthorizationHeaderMalformed</Code><Message>The authorization header is malformed; the region "
    b"'us-east-1' is wrong; expecting 'eu-central-1'</Message><Region>eu-central-1</Region></Error>",
)
WRONG_REGION_IN_WORDS = refusal(400, "AuthorizationHeaderMalformed", "the region is wrong; expecting 'eu-central-1'")
SOME_REGION = refusal(400, "IllegalLocationConstraintException", "The location constraint is incompatible")
WEB_PAGE = Answer(200, b"<!DOCTYPE html><html><body><p>Log in to this network<br></body></html>", PAGE)
LOST_PAGE = Answer(404, b"default backend - 404", PAGE)
ELSEWHERE = Answer(301, b"", (("Location", "/elsewhere/"),))
EMPTY = Answer(200, b"", ())
ENDLESS = Answer(200, b'{"half an obj', (("ETag", '"0"'),), length=False)

CUT_UPLOAD, CUT_DOWNLOAD, HANG, LOSE_ANSWER = "cut upload", "cut download", "hang", "lose answer"
"""Half of the body reaches the server, then a reset; half of it reaches the client; no answer ever comes; the server
does what was asked and its answer never comes."""

Fault = Answer | str


@dataclass
class Rule:
    """A fault, and the requests that meet it."""

    fault: Fault
    method: str
    key: str
    times: int
    lacks: str = ""
    """Only requests without this header meet it, where one is named."""
    met: int = 0
    """Requests that have met it."""

    def takes(self, method: str, path: str, headers: Mapping[str, str]) -> bool:
        """Counts a request that meets the fault, and returns True for it."""
        if self.lacks and self.lacks.lower() in headers:
            return False
        if method not in self.method.split("|") or self.key not in path or self.met >= self.times:
            return False
        self.met += 1
        return True


class StoreFaults:
    """The proxy. Everything passes until it is told otherwise."""

    def __init__(self, endpoint: str) -> None:
        upstream = urlsplit(endpoint)
        self.upstream = (str(upstream.hostname), int(upstream.port or 80))
        self.rule: Rule | None = None
        self.lock = threading.Lock()
        self.healed = threading.Event()
        """Event that releases hanging requests, without an answer."""
        self.seen: list[str] = []
        """`METHOD /path` of every request."""
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def fail(
        self, fault: Fault, method: str = "GET|HEAD|PUT|POST|DELETE", key: str = "", times: int = 10**6, lacks: str = ""
    ) -> Rule:  # fmt: skip
        """Applies the fault to requests of these methods with `key` in their path."""
        with self.lock:
            self.healed.clear()
            self.rule = Rule(fault, method, key, times, lacks)
            return self.rule

    def heal(self) -> None:
        with self.lock:
            self.rule = None
            self.healed.set()

    def fault_for(self, method: str, path: str, headers: Mapping[str, str]) -> Fault | None:
        with self.lock:
            self.seen.append(f"{method} {path}")
            return self.rule.fault if self.rule is not None and self.rule.takes(method, path, headers) else None

    def close(self) -> None:
        self.heal()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, faults: StoreFaults) -> None:
        self.faults = faults
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Connections break here all the time, and on purpose."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server.faults.fault_for(
            self.command, self.path, {name.lower(): value for name, value in self.headers.items()}
        )
        if isinstance(fault, Answer):
            self._answer(fault.status, list(fault.headers), fault.body, length=fault.length)
        elif fault == HANG:
            self._hang()
        elif fault == CUT_UPLOAD:
            self._forward(body, len(body) // 2)
            self._reset()
        else:
            status, headers, data = self._forward(body, len(body))
            if fault == LOSE_ANSWER:
                self._hang()
            elif fault == CUT_DOWNLOAD:
                self._answer(status, headers, data, len(data) // 2)
                self._reset()
            else:
                self._answer(status, headers, data)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def _forward(self, body: bytes, sent: int) -> tuple[int, list[tuple[str, str]], bytes]:
        """The request to the server, with only so much of its body; the answer, where the request was whole."""
        connection = http.client.HTTPConnection(*self.server.faults.upstream, timeout=30)
        with contextlib.closing(connection):
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in _OF_ONE_CONNECTION:
                    connection.putheader(name, value)
            connection.endheaders()
            connection.send(body[:sent])
            if sent < len(body):
                return 0, [], b""
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()

    def _answer(
        self, status: int, headers: list[tuple[str, str]], data: bytes, sent: int | None = None, length: bool = True
    ) -> None:
        """`data` as announced in full, and as far as `sent`."""
        names = {name.lower() for name, _ in headers}
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in _OF_ONE_CONNECTION:
                self.send_header(name, value)
        self.close_connection = not length
        if length and "content-length" not in names:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:sent])
        self.wfile.flush()

    def _hang(self) -> None:
        self.server.faults.healed.wait(60)
        self._reset()

    def _reset(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
