"""The gateway of a worker: a WebSocket server in a thread of its own, whose clients are the worker's environments.

To Redis the worker is like any other: it claims, and pushes fragments.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter, deque
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from typing import Any

import redis
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from stagecoach.rollout_worker.environments.space_data import data_of, space_of
from stagecoach.rollout_worker.gateway.connections import bounded
from stagecoach.rollout_worker.gateway.environment import ExternalEnvironments
from stagecoach.rollout_worker.gateway.messages import (
    PROTOCOL,
    Bye,
    Hello,
    Refused,
    arrival,
    parse,
    single_agent,
)
from stagecoach.rollout_worker.gateway.sessions import Session, Sessions
from stagecoach.rollout_worker.gateway.tokens import Tokens
from stagecoach.shared.base import world
from stagecoach.shared.base.errors import ConfigError, StagecoachError, UnsupportedSpace
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.spaces import EnvironmentDescription
from stagecoach.shared.policies.policy import Policy
from stagecoach.shared.policies.serialization import VersionHeader, encode_policy
from stagecoach.shared.protocol.experience_log import ExperienceLog
from stagecoach.shared.protocol.heartbeat import Heartbeat
from stagecoach.shared.storage.object_store import ObjectStore

_LOGGER = logging.getLogger("stagecoach.worker")
_HELLO_SECONDS = 10.0
_PING_SECONDS = 10.0
_VALID_SECONDS = 2.0
_GOODBYE_SECONDS = 2.0
_MOST_WAITING, _PAUSE_SECONDS = 1000, 0.01
"""Messages of a session that wait for the worker, while a client sends its journal again."""
_MOST_WAITING_BYTES = 4 << 20
_MORE_CONNECTIONS = 8
"""Connections of a client beyond two for each slot."""
_NAMES = 1000
"""Sessions that a client may open at once; each second it may open another one."""
_TURN = 16
"""Messages of a connection that are handled before it is another one's turn."""
_PATH = "/v1/play"
_NO_TOKEN = {"error": "a token is required: `stagecoach gateway add RUN CLIENT` makes one"}
_EVERYWHERE = {"Access-Control-Allow-Origin": "*"}
"""Headers that let pages in browsers read an answer; the token protects it."""


class Gateway:
    """Listens for clients while the context lasts."""

    def __init__(
        self, config: Config, description: EnvironmentDescription, log: ExperienceLog, heartbeat: Heartbeat,
        store: ObjectStore, run_id: str, worker: int,
    ) -> None:  # fmt: skip
        """Raises `ConfigError` if the port is not free."""
        gateway = config.gateway
        self._log, self._run_id, self._worker, self._settings = log, run_id, worker, gateway
        self._description = description
        self.run_ended = False
        """Clients need not come back."""
        self._turns = config.rollout.fragment_steps if gateway.late == "drop" else None
        self._published: tuple[int, str] | None = None
        self._files: dict[str, bytes] = {}
        """Policy id → `policy.safetensors` of the published version."""
        assert config.environment.spaces is not None
        self._shown = _spelled_out(config.environment.spaces.model_dump(exclude_none=True, exclude_defaults=True))
        self._tokens = Tokens(store)
        self._connections = Counter[str]()
        """Client → its connections."""
        self._most = 2 * config.environment.num_envs + _MORE_CONNECTIONS
        self._names, self._named, self._began = set[str](), Counter[str](), world.monotonic()
        """Sessions that were opened here, and how many of each client's."""
        self._ready: deque[asyncio.Event] = deque()
        """Connections that have something to send."""
        self._waking = False
        self.sessions = Sessions(config.environment.num_envs, gateway.away_seconds)
        self.environment = ExternalEnvironments(
            self.sessions, description, config.environment.num_envs, gateway, heartbeat
        )
        port = gateway.port + worker if gateway.port else 0
        try:
            family = socket.getaddrinfo(gateway.host, port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((gateway.host, port), family=family)
        except OSError as error:
            raise ConfigError(
                f"the gateway of worker-{worker} cannot listen at gateway.host={gateway.host}, port {port} "
                f"(gateway.port={gateway.port} and the worker's number): {error.strerror or error}"
            ) from None
        scheme = "ws" if gateway.cert_file is None else "wss"
        self.url = f"{scheme}://{gateway.host}:{self._listener.getsockname()[1]}{_PATH}"
        routes = [
            WebSocketRoute(_PATH, self._play), Route(_PATH, self._explain), Route("/v1/policy/{policy}", self._policy)
        ]  # fmt: skip
        served = uvicorn.Config(
            Starlette(routes=routes), **bounded(), loop="asyncio",
            lifespan="off", log_config=None, access_log=False, server_header=False,
            proxy_headers=False, timeout_graceful_shutdown=2,
            ws_max_size=gateway.max_message_bytes, ws_ping_interval=_PING_SECONDS, ws_ping_timeout=_PING_SECONDS,
            ssl_certfile=gateway.cert_file, ssl_keyfile=gateway.key_file,
        )  # fmt: skip
        self._server = uvicorn.Server(served)
        self._thread = world.Thread(target=self._serve, name="gateway", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            self._server.run([self._listener])
        except Exception:
            _LOGGER.exception("the gateway's server failed")

    def close(self) -> None:
        """Says goodbye to the clients, and ends the server."""
        last = {"type": "goodbye", "reason": "this gateway ends; connect again later"}
        if self.run_ended:
            last = {"type": "error", "error": "ended", "message": "the run has ended; it takes no more experience"}
        with self.sessions.changed:
            for session in self.sessions.by_name.values():
                session.post(last)
        until = world.monotonic() + _GOODBYE_SECONDS  # before the server cuts their connections
        while any(its.send is not None for its in self.sessions.by_name.values()) and world.monotonic() < until:
            world.sleep(_PAUSE_SECONDS)
        self._server.should_exit = True
        self._thread.join(10.0)
        self._listener.close()

    def publish(
        self, header: VersionHeader, policies: Mapping[str, Policy], exploration: Callable[[str], dict[str, Any]]
    ) -> None:
        """Adopts the version of the next fragment; clients that act locally hear of it, and may fetch it."""
        self.environment.version = header.version
        if self.sessions.local and self._published != (header.version, header.history):
            self._published = header.version, header.history
            self._files = {policy_id: encode_policy(its, header.version) for policy_id, its in policies.items()}
            self.environment.policy = {
                "type": "policy", "version": header.version, "turns": self._turns,
                "exploration": {policy_id: exploration(policy_id) for policy_id in policies},
            }  # fmt: skip

    def summary(self) -> dict[str, Any]:
        """Returns what the heartbeat reports."""
        return {"gateway": self.url, **self.sessions.summary()}

    # The server's thread

    async def _policy(self, request: Request) -> Response:
        client, denial = await self._client(request)
        if client is None:
            return JSONResponse(*denial, _EVERYWHERE)
        if (file := self._files.get(request.path_params["policy"])) is None:
            error = f"no such policy, or no session that acts locally yet; expected {', '.join(self._files) or 'one'}"
            return JSONResponse({"error": error}, 404, _EVERYWHERE)
        return Response(file, 200, _EVERYWHERE, "application/octet-stream")

    async def _play(self, websocket: WebSocket) -> None:
        client, denial = await self._client(websocket)
        if client is not None and self._connections[client] >= self._most:
            client, denial = None, ({"error": f"more than {self._most} connections of {client}"}, 503)
        if client is None:
            await websocket.send_denial_response(JSONResponse(*denial))
            return
        self._connections[client] += 1
        try:
            await websocket.accept()
            await self._serve_client(websocket, client)
        finally:
            self._connections[client] -= 1

    async def _serve_client(self, websocket: WebSocket, client: str) -> None:
        try:
            await self._session(websocket, client)
        except Refused as error:
            await _close(websocket, {"type": "error", "error": error.code, "message": str(error)}, 1008)
        except (redis.RedisError, StagecoachError) as error:
            _LOGGER.warning("the gateway closes a connection of %s: %s", client, error)
            message = "the gateway cannot reach the run's services now; connect again"
            await _close(websocket, {"type": "error", "error": "away", "message": message}, 1013)
        except WebSocketDisconnect:
            pass
        except Exception:
            _LOGGER.exception("a connection of %s failed", client)
            message = "the gateway failed; its log says why"
            await _close(websocket, {"type": "error", "error": "failed", "message": message}, 1011)

    async def _explain(self, request: Request) -> JSONResponse:
        """Answers a plain GET, as a page in a browser cannot see the status of a WebSocket that was refused."""
        client, denial = await self._client(request)
        if client is None:
            return JSONResponse(*denial, _EVERYWHERE)
        return JSONResponse({"error": "expected a WebSocket"}, 426, {**_EVERYWHERE, "Upgrade": "websocket"})

    async def _client(self, connection: HTTPConnection) -> tuple[str | None, tuple[dict[str, str], int]]:
        """Returns the client whose token the request has, and what it is answered without one."""
        scheme, _, token = connection.headers.get("authorization", "").partition(" ")
        token = token.strip() if scheme.lower() == "bearer" else connection.query_params.get("token", "")
        try:
            return await run_in_threadpool(self._tokens.client, token) if token else None, (_NO_TOKEN, 401)
        except StagecoachError as error:
            _LOGGER.warning("the gateway cannot read its clients' tokens: %s", error)
            return None, ({"error": "the gateway cannot read its clients' tokens now; connect again"}, 503)

    async def _session(self, websocket: WebSocket, client: str) -> None:
        try:
            async with asyncio.timeout(_HELLO_SECONDS):
                hello = parse(await _frame(websocket))
        except TimeoutError:
            raise Refused("hello", f"no hello within {_HELLO_SECONDS:g} s") from None
        if not isinstance(hello, Hello):
            raise Refused("hello", f"the first message is a {hello.type}; expected a hello")
        if hello.protocol != PROTOCOL:
            raise Refused("protocol", f"the client speaks protocol {hello.protocol}; expected {PROTOCOL}")
        if hello.spaces is not None and _spelled_out(hello.spaces) != self._shown:
            raise Refused(
                "spaces", f"the client's spaces are {hello.spaces!r:.300}; the run's are {self._shown!r:.300}"
            )
        if hello.acting == "local" and self._description.sides:
            raise Refused("acting", "who acts is drawn for each match; act remotely")
        name = f"{client}/{hello.session}"
        if name not in self._names:  # Redis keeps each for good
            if self._named[client] > _NAMES + world.monotonic() - self._began:
                raise Refused("full", f"{client} opens new sessions faster than one a second; give them fewer names")
            self._names.add(name)
            self._named[client] += 1
        self.sessions.require_slot(name)  # before the session belongs to this gateway for good
        number, owner = await run_in_threadpool(partial(self._log.open_session, name, self._worker))
        if owner != self._worker:
            raise Refused("elsewhere", f"session {name} is at the gateway of worker-{owner}; connect there")
        outbox, ready, loop = deque[str](), asyncio.Event(), asyncio.get_running_loop()

        def send(text: str) -> None:
            outbox.append(text)
            self._ready.append(ready)
            if not self._waking:
                self._waking = True
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(self._wake)

        kept, settled = hello.journal_from, 0 if number is None else number
        session = self.sessions.connect(
            name, settled if kept is None else max(settled, kept), send, hello.acting == "local"
        )
        welcome = {
            "type": "welcome", "protocol": PROTOCOL, "run": self._run_id, "session": name, "from": session.settled,
            "next": session.expected, "spaces": self._shown,
        }  # fmt: skip
        if session.local or single_agent(self._description) is None:
            welcome["agents"] = self._description.agents
        self.sessions.welcome(session, welcome)
        left = False
        tasks = [
            asyncio.create_task(self._send(websocket, outbox, ready)),
            asyncio.create_task(self._receive(websocket, session, outbox)),
            asyncio.create_task(self._still_valid(client)),
        ]  # fmt: skip
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                left = task.result() is True or left
        except Refused:  # the client cannot go on, and its slot is not kept
            left = True
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.sessions.disconnect(session, send, left)
        await _close(websocket, {"type": "goodbye", "reason": "the session ends" if left else "it is over"}, 1000)

    def _wake(self) -> None:
        """Wakes connections, once for all that the worker has answered meanwhile."""
        self._waking = False
        while self._ready:
            self._ready.popleft().set()

    async def _send(self, websocket: WebSocket, outbox: deque[str], ready: asyncio.Event) -> None:
        while await ready.wait():
            ready.clear()
            while outbox:
                text = outbox.popleft()
                await websocket.send_text(text)
                if text.startswith(('{"type":"goodbye"', '{"type":"error"')):
                    return

    async def _receive(self, websocket: WebSocket, session: Session, outbox: deque[str]) -> bool:
        """Returns true after a bye. Reads no more from a client that has much waiting, or does not read answers."""
        for number in count(1):
            if number % _TURN == 0:  # what was read ahead is there without waiting
                await asyncio.sleep(0)
            while (
                len(session.inbox) > _MOST_WAITING or len(outbox) > _MOST_WAITING
                or session.received_bytes - session.taken_bytes > _MOST_WAITING_BYTES
            ):  # fmt: skip
                await asyncio.sleep(_PAUSE_SECONDS)
            frame = await _frame(websocket)
            message = parse(frame)
            if isinstance(message, Bye):
                return True
            if isinstance(message, Hello):
                raise Refused("hello", "a second hello on the same connection")
            self.sessions.deliver(session, arrival(message, self._description, len(frame)))
        raise AssertionError("count has no end")

    async def _still_valid(self, client: str) -> None:
        while await run_in_threadpool(self._tokens.valid, client):
            await asyncio.sleep(_VALID_SECONDS)
        raise Refused("revoked", f"the token of {client} was revoked")


def _spelled_out(spaces: dict[str, Any]) -> dict[str, Any]:
    """Returns spaces with all arguments, so that equal spaces compare equal; raises `Refused`."""
    try:
        if "agents" in spaces:
            return {"agents": {agent: _spelled_out(its) for agent, its in spaces["agents"].items()}}
        return {name: data_of(space_of(its, f"spaces.{name}")) for name, its in spaces.items()}
    except UnsupportedSpace as error:
        raise Refused("spaces", str(error)) from None


async def _frame(websocket: WebSocket) -> str | bytes:
    """Returns the next message; raises `WebSocketDisconnect`."""
    message = await websocket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1006))
    text: str | bytes | None = message.get("text")
    return message["bytes"] if text is None else text


async def _close(websocket: WebSocket, last: dict[str, Any], code: int) -> None:
    if websocket.application_state is not WebSocketState.CONNECTED:
        return
    with contextlib.suppress(RuntimeError, WebSocketDisconnect):
        await websocket.send_json(last)
        await websocket.close(code)
