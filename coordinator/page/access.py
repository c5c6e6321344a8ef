"""Access control of the page: a token, or the cookie that a URL with the token sets.

The cookie holds a value derived from the token. A page that is already open thus stays usable while somebody else
tries tokens, and after the server restarts with the same token.
"""

import hashlib
import hmac
from collections import deque
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stagecoach.shared.base import world

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_WRONG_TOKENS, _WINDOW_SECONDS, _ADDRESSES = 10, 60.0, 1000
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def refusal(status: int, reason: str) -> JSONResponse:
    return JSONResponse({"error": reason}, status)


class Gate:
    """Rejects unauthorized requests and adds security headers; without a token only loopback may read."""

    def __init__(self, app: ASGIApp, token: str | None, port: int, read_only: bool) -> None:
        self._app, self._token, self._read_only = app, token, read_only
        self._cookie = f"stagecoach_{port}"
        self._session = hmac.new((token or world.token_hex()).encode(), b"session", hashlib.sha256).hexdigest()
        self._wrong: dict[str, deque[float]] = {}
        """Client address → times of its last wrong tokens."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers["Cache-Control"] = "no-cache" if scope["path"].startswith("/static/") else "no-store"
            await send(message)

        request = Request(scope)
        refused = self._refuse_reader(request) or self._refuse_order(request)
        await (refused or self._app)(scope, receive, with_headers)

    def _refuse_reader(self, request: Request) -> Response | None:
        """Returns None for a request that may read."""
        if self._token is None:
            if _host_name(request) in LOOPBACK:  # a foreign site whose name resolves to this machine must not read
                return None
            return refusal(403, "without a token, the page is served only at 127.0.0.1 and localhost")
        known = hmac.compare_digest(request.cookies.get(self._cookie, "").encode(), self._session.encode())
        in_url = request.query_params.get("token")
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else in_url
        if not known:
            if given is None:
                return refusal(401, "a token is required: open the URL that `stagecoach page` printed")
            if not hmac.compare_digest(given.encode(), self._token.encode()):  # first: others may share the address
                address = request.client.host if request.client else ""
                wrong = self._wrong[address] = self._wrong.pop(address, deque(maxlen=_WRONG_TOKENS))
                if len(self._wrong) > _ADDRESSES:  # only the most recent clients are remembered
                    del self._wrong[next(iter(self._wrong))]
                if len(wrong) == _WRONG_TOKENS and world.monotonic() - wrong[0] < _WINDOW_SECONDS:
                    return refusal(429, "too many wrong tokens; try again in a minute")
                wrong.append(world.monotonic())
                return refusal(401, "wrong token: open the URL that `stagecoach page` printed last")
        if in_url is None or request.method != "GET":
            return None
        response = RedirectResponse("/" + request.url.path.lstrip("/"), 303)  # no token stays in history or address bar
        response.set_cookie(self._cookie, self._session, httponly=True, samesite="strict")
        return response

    def _refuse_order(self, request: Request) -> Response | None:
        """Returns None for a request that reads or may give orders."""
        if request.method in ("GET", "HEAD"):
            return None
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
            return refusal(403, f"the request comes from another origin ({origin})")
        if self._token is None:
            return refusal(403, "without a token, the page is read-only")
        return refusal(403, "the page is read-only (--read-only)") if self._read_only else None


def _host_name(request: Request) -> str | None:
    try:
        return urlsplit(f"//{request.headers.get('host', '')}").hostname
    except ValueError:
        return None
