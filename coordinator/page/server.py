"""The page's server: static files, a JSON API and server-sent events for all runs of a folder.

It runs in a thread of `stagecoach page` or of the coordinator (`train --page`). Waits for Redis or the store happen in
a thread pool, never in the event loop.
"""

import asyncio
import contextlib
import errno
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import redis
from pydantic import BaseModel, Field, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from stagecoach.coordinator.catalog.league import league_of
from stagecoach.coordinator.page.access import LOOPBACK, Gate, refusal
from stagecoach.coordinator.page.connections import serving
from stagecoach.coordinator.page.panels import PANELS
from stagecoach.coordinator.page.prometheus import exposition
from stagecoach.coordinator.page.view import RunView, Views, away, jsonable, matching
from stagecoach.coordinator.run_access.run import Run
from stagecoach.coordinator.run_access.run_comparison import config_fields, differences
from stagecoach.coordinator.run_access.run_list import list_runs
from stagecoach.shared.base import world
from stagecoach.shared.base.errors import (
    CheckpointNotFound,
    ObjectMissing,
    RunNotFound,
    StagecoachError,
    UserError,
    headline,
)
from stagecoach.shared.base.failure import reason_in_words

STATIC = Path(__file__).parent / "static"
_EVENT_SECONDS = 1.0
_MOST_INFLUENCES = 100
"""Fragments, and episodes, in an explanation; `stagecoach explain --json` has all."""
_MAX_BODY, _BODY_SECONDS = 64 * 1024, 10.0


@contextlib.contextmanager
def serve(
    runs_dir: Path, token: str | None, host: str = LOOPBACK[0], port: int = 0, *, read_only: bool = False
) -> Iterator[str]:
    """Serves the page while the context lasts; yields its URL, without the token.

    Args:
        token: None only for a loopback `host`; the page is then read-only.
        port: 0 for a free one.

    Raises:
        UserError: the address is not available.
    """
    with contextlib.closing(_listen(host, port)) as listener:
        port = listener.getsockname()[1]
        views = Views(runs_dir)
        name = socket.gethostname() if host in ("0.0.0.0", "::") else host
        with serving(application(views, token, port, read_only), listener), contextlib.closing(views):
            yield f"http://{f'[{name}]' if ':' in name else name}:{port}"


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"port {port} of {host} is in use; choose another --port, or 0 for a free one") from None
        raise UserError(f"cannot listen on port {port} of {host}: {error.strerror or error}") from None


def application(views: Views, token: str | None, port: int, read_only: bool) -> Starlette:
    page = _Page(views, can_order=token is not None and not read_only)
    run = "/api/runs/{run_id}"
    routes = [
        Route("/", page.index),
        Route("/runs/{run_id}", page.index),
        Mount("/static", StaticFiles(directory=STATIC, check_dir=False)),
        Route("/api/page", page.page),
        Route("/api/panels", lambda _: JSONResponse([asdict(panel) for panel in PANELS])),
        Route("/api/runs", page.runs),
        Route(run, page.snapshot),
        Route(f"{run}/series", page.series),
        Route(f"{run}/config", page.config),
        Route(f"{run}/explain", page.explain),
        Route(f"{run}/updates", page.updates),
        Route(f"{run}/league", page.league),
        Route(f"{run}/videos", page.videos),
        Route(f"{run}/videos/{{name}}", page.video),
        *(Route(f"{run}/{verb}", page.order, methods=["POST"]) for verb in _VERBS),
        Route("/metrics", page.metrics),
    ]
    handlers: dict[Any, Callable[..., Response]] = {
        HTTPException: lambda _, error: refusal(error.status_code, error.detail),
        StagecoachError: lambda _, error: refusal(_status_of(error), _line(error)),
        redis.RedisError: lambda _, error: refusal(_status_of(error), f"Redis: {_line(error)}"),
        Exception: lambda _, error: refusal(500, headline(error)),
    }
    gate = Middleware(Gate, token=token, port=port, read_only=read_only)
    return Starlette(routes=routes, middleware=[gate], exception_handlers=handlers)


def _status_of(error: Exception) -> int:
    if isinstance(error, RunNotFound | CheckpointNotFound | ObjectMissing):
        return 404
    if away(error):
        return 503
    return 400 if isinstance(error, UserError) else 409


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


class _Page:
    """Routes; those that are not `async` run in Starlette's thread pool."""

    def __init__(self, views: Views, can_order: bool) -> None:
        self._views, self._can_order, self._learning = views, can_order, world.Lock()

    def index(self, _: Request) -> Response:
        return FileResponse(STATIC / "index.html", media_type="text/html")

    def page(self, _: Request) -> Response:
        return JSONResponse({"can_order": self._can_order})

    def runs(self, _: Request) -> Response:
        rows = [asdict(row) for row in list_runs(self._views.runs_dir)]
        for row in rows:
            row["reason"] = reason_in_words(row["reason"].partition("\n")[0])
        return JSONResponse(jsonable(rows))

    def snapshot(self, request: Request) -> Response:
        return Response(self._known(request).snapshot_json, media_type="application/json")

    def _known(self, request: Request) -> RunView:
        view = self._views.of(request.path_params["run_id"])
        if not view.wait():
            raise HTTPException(503, f"run {view.run.run_id} has not been read yet; try again")
        return view

    def series(self, request: Request) -> Response:
        view, stream = self._known(request), request.query_params.get("stream", "train")
        if stream not in view.curves:
            raise UserError(f"unknown stream {stream!r}; expected one of {', '.join(view.curves)}")
        names = request.query_params.getlist("metric")
        if not names:
            raise UserError("no metric requested; expected ?metric=NAME (repeatable; NAME* matches a prefix)")
        there = view.curves[stream].bins.names
        of_panels = {line.metric for panel in PANELS for line in panel.lines}
        if unknown := [name for name in names if name not in of_panels and not matching(name, there)]:
            known = f"available: {', '.join(there)}" if there else "the stream is empty"
            raise UserError(f"unknown metric {', '.join(map(repr, unknown))} in stream {stream}; {known}")
        return JSONResponse(jsonable(view.series(stream, names)))

    def config(self, request: Request) -> Response:
        ids = [request.path_params["run_id"], *request.query_params.getlist("against")[-1:]]
        mine, *other = (config_fields(self._views.attach(run_id)) for run_id in ids)
        return JSONResponse(jsonable({"config": mine, "differences": differences(mine, *other)}))

    def explain(self, request: Request) -> Response:
        """Ranks what moved the policy to `?version=N`, over `last` updates; one request at a time learns again."""
        try:
            version, last = (int(request.query_params.get(name, "1")) for name in ("version", "last"))
        except ValueError:
            raise UserError("expected ?version=NUMBER, and last=NUMBER if it is not 1") from None
        run = self._views.attach(request.path_params["run_id"])
        if not self._learning.acquire(blocking=False):
            raise HTTPException(503, "another version is being explained; try again when that is done")
        try:
            found = run.explain(version, last).as_dict()
        finally:
            self._learning.release()
        first = {name: found[name][:_MOST_INFLUENCES] for name in ("influences", "episodes")}
        return JSONResponse(jsonable(found | first))

    async def updates(self, request: Request) -> Response:
        view = await run_in_threadpool(self._views.of, request.path_params["run_id"])
        return StreamingResponse(self._events(view), media_type="text/event-stream")

    async def _events(self, view: RunView) -> AsyncIterator[str]:
        """Yields changes until the client disconnects or the server ends."""
        snapshot, rows = "", dict[str, int]()
        await run_in_threadpool(view.wait)
        while not self._views.closed.is_set():
            changes = ""
            if view.snapshot_json != snapshot:
                snapshot = view.snapshot_json
                changes += f"event: snapshot\ndata: {snapshot}\n\n"
            if snapshot and view.rows != rows:
                rows = view.rows
                changes += f"event: rows\ndata: {json.dumps(rows)}\n\n"
            yield changes or ": nothing new\n\n"
            view.wanted.set()
            await asyncio.sleep(_EVENT_SECONDS)

    def league(self, request: Request) -> Response:
        """Ratings and payoffs from the newest checkpoint; too large for each snapshot."""
        run = self._views.attach(request.path_params["run_id"])
        return JSONResponse(jsonable(league_of(run.checkpoint_store(), run.config)))

    def videos(self, request: Request) -> Response:
        found = [(path, path.stat()) for path in self._videos_of(request).values()]
        entries = [{"name": path.name, "bytes": stat.st_size, "time": stat.st_mtime} for path, stat in found]
        return JSONResponse(sorted(entries, key=lambda entry: -float(entry["time"])))

    def video(self, request: Request) -> Response:
        if (path := self._videos_of(request).get(name := request.path_params["name"])) is None:
            raise HTTPException(404, f"unknown video {name!r}")
        return FileResponse(path, media_type="video/mp4")

    def _videos_of(self, request: Request) -> dict[str, Path]:
        folder = self._views.attach(request.path_params["run_id"]).folder.path / "videos"
        return {path.name: path for path in folder.glob("*.mp4") if path.is_file()}

    def metrics(self, _: Request) -> Response:
        return Response(exposition(self._views.live()), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def order(self, request: Request) -> Response:
        verb, run_id = request.url.path.rpartition("/")[2], request.path_params["run_id"]
        body = await _body(request)
        return JSONResponse({"done": await run_in_threadpool(self._order, verb, run_id, body)})

    def _order(self, verb: str, run_id: str, body: bytes) -> str:
        model, give, done = _VERBS[verb]
        asked, run = _parsed(model, body), self._views.attach(run_id)
        try:
            return done.format(give(run, asked))
        except UserError as error:
            if _status_of(error) in (404, 503):
                raise
            raise HTTPException(400 if run.live else 409, _line(error)) from None


class _Nothing(BaseModel, extra="forbid", strict=True):
    """Body of an order without arguments."""


class _Scale(_Nothing):
    workers: int | None = None
    auto: bool = False
    min: int | None = None
    max: int | None = None


class _Promote(_Nothing):
    checkpoint: str


class _Note(_Nothing):
    text: str = Field(max_length=2000)


def _scale(run: Run, asked: _Scale) -> str:
    if (asked.workers is None) != asked.auto:
        raise UserError('expected {"workers": 3}, or {"auto": true, "min": 1, "max": 4}')
    return run.scale(asked.workers, min_workers=asked.min, max_workers=asked.max)


_VERBS: dict[str, tuple[type[BaseModel], Callable[[Run, Any], object], str]] = {
    "stop": (_Nothing, lambda run, _: run.stop(), "the run writes a final checkpoint and ends"),
    "checkpoint": (_Nothing, lambda run, _: run.checkpoint(), "a checkpoint is written after the current update"),
    "scale": (_Scale, _scale, "scaling {}"),
    "promote": (_Promote, lambda run, asked: run.promote(asked.checkpoint), "{} is promoted"),
    "note": (_Note, lambda run, asked: run.note(asked.text), "the note is added"),
}
"""Order → model of its body, function that gives it, and reply (formatted with the function's result)."""


async def _body(request: Request) -> bytes:
    body = b""
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > _MAX_BODY:
                    raise HTTPException(413, f"the request body has more than {_MAX_BODY} bytes")
    except TimeoutError:
        raise HTTPException(408, f"the request body did not arrive within {_BODY_SECONDS:g} s") from None
    return body or b"{}"


def _parsed(kind: type[BaseModel], body: bytes) -> BaseModel:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(": ".join([*map(str, first["loc"]), first["msg"]])) from None
