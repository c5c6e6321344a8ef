"""Runs whose environments are in other programs, and a client that costs little, so that the gateway is what is
measured."""

from __future__ import annotations

import json
import random
import secrets
import select
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from stagecoach.coordinator.run_access.run import Run
from stagecoach.rollout_worker.gateway.tokens import add_token
from stagecoach.shared.config.loading import parse_config
from stagecoach.shared.protocol.heartbeat import Wait, poll

SPACES = {
    "observation": {"type": "Box", "low": -1e9, "high": 1e9, "shape": [4]},
    "action": {"type": "Discrete", "n": 2},
}
_LIMIT = 500
_WINDOW = 32
"""Messages that a session that acts itself writes at once."""


@contextmanager
def outside_run(folder: Path, sessions: int, **sections: Any) -> Iterator[tuple[Run, str, str]]:
    """A real run that waits for clients, with one gateway; yields it, the gateway's URL, and a token."""
    config = {
        "runs_dir": str(folder / "runs"), "gateway": {"port": 0}, "evaluation": {"episodes": 0},
        "environment": {"id": "cartpole", "api": "external", "num_envs": sessions, "spaces": SPACES},
        "stop_at": {"env_steps": 10**9},
    }  # fmt: skip
    run = Run.start(parse_config(config | sections), "run")
    try:
        yield run, address(run), add_token(run.checkpoint_store().store, "bench")
    finally:
        run.stop()
        run.wait(120)


def address(run: Run) -> str:
    """Returns the gateway's URL, once it listens."""
    found: list[str] = []

    def listens() -> bool:
        found[:] = [event.text.split()[-1] for event in run.events() if "listens at" in event.text]
        return bool(found)

    poll(Wait("the gateway to listen", 120), listens)
    return found[-1]


class _Carts:
    """One session: a WebSocket whose frames are written by hand, and a CartPole."""

    def __init__(self, url: str, token: str, name: str, local: bool, random_seed: int) -> None:
        place = urlsplit(url)
        self.socket = socket.create_connection((str(place.hostname), int(place.port or 0)))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(
            f"GET {place.path} HTTP/1.1\r\nHost: {place.netloc}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
            f"Authorization: Bearer {token}\r\n\r\n".encode()
        )
        self._data = b""
        while b"\r\n\r\n" not in self._data:
            self._data += self.socket.recv(65536)
        head, _, self._data = self._data.partition(b"\r\n\r\n")
        assert b" 101 " in head, head
        self._cart: Any = CartPoleEnv()
        self._random = random.Random(random_seed)
        self.seq, self.ends, self._length, self.version = 0, 0, -1, -1
        self._may: float = 0
        self._asked, self._unsent = False, b""
        self.local, self.acknowledged, self.sent_at, self.due, self.phase = local, 0, 0.0, 0.0, random.random()
        hello = {"type": "hello", "protocol": 1, "session": name, "acting": "local" if local else "remote"}
        self.socket.sendall(_framed(json.dumps(hello)))

    def messages(self) -> list[dict[str, Any]]:
        """Reads what has arrived."""
        self._data += self.socket.recv(1 << 20)
        found = []
        while len(self._data) >= 2:
            size, start = self._data[1], 2
            if size == 126:
                size, start = int.from_bytes(self._data[2:4], "big"), 4
            if len(self._data) < start + size:
                break
            kind, body = self._data[0] & 15, self._data[start : start + size]
            self._data = self._data[start + size :]
            if kind == 9:
                self.socket.sendall(bytes([0x8A, 0x80 | size, 0, 0, 0, 0]) + body)
            elif kind == 1:
                found.append(json.loads(body))
        for message in found:
            if message["type"] == "acknowledged":
                self.acknowledged = message["seq"]
            elif message["type"] == "policy":
                self.version = message["version"]
                self._may = float("inf") if message["turns"] is None else message["turns"]
            elif message["type"] == "action":
                self._asked = False
            elif message["type"] == "hold":
                self._may = 0
            elif message["type"] in ("error", "goodbye"):
                raise ConnectionError(str(message))
        return found

    def act(self, action: int | None) -> str:
        """Takes a step, or begins an episode; returns the message."""
        if self._length < 0:
            seen, _ = self._cart.reset(seed=self._random.getrandbits(30))
            self._length, over = 0, False
            text = f'{{"type":"reset","seq":{self.seq},"observation":{seen.tolist()}'
        else:
            seen, reward, over, _, _ = self._cart.step(self._random.getrandbits(1) if action is None else action)
            self._length += 1
            cut = self._length == _LIMIT and not over
            text = (
                f'{{"type":"step","seq":{self.seq},"reward":{reward},"observation":{seen.tolist()},'
                f'"terminated":{json.dumps(bool(over))},"truncated":{json.dumps(cut)}'
            )
            if over := bool(over or cut):
                self._length = -1
        self.seq, self.ends, self.ended = self.seq + 1, self.ends + over, over
        return text

    def exchange(self, action: int) -> None:
        """Sends the outcome of an action; after an episode's end, also the first message of the next one."""
        data = _framed(self.act(action) + "}")
        self.socket.sendall(data + _framed(self.act(None) + "}") if self.ended else data)
        self.sent_at = time.perf_counter()

    def piece(self) -> None:
        """Sends the next turns of a session that acts itself, with actions drawn at random; asks for the action after
        the last turn of a version."""
        parts: list[bytes] = []
        while not self._unsent and not self._asked and len(parts) < _WINDOW:
            text = self.act(None)
            asks = not self.ended and self._may <= 0
            if not self.ended and not asks:
                self._may -= 1
                text += f',"action":{self._random.getrandbits(1)},"version":{self.version}'
            self._asked = asks
            parts.append(_framed(text + "}"))
        self._unsent = self._unsent or b"".join(parts)
        with suppress(BlockingIOError):  # the gateway does not read now
            self._unsent = self._unsent[self.socket.send(self._unsent, socket.MSG_DONTWAIT) :]


def _framed(text: str) -> bytes:
    body = text.encode()
    size = bytes([0x80 | len(body)]) if len(body) < 126 else b"\xfe" + len(body).to_bytes(2, "big")
    return b"\x81" + size + bytes(4) + body  # a mask of zeros


class CartPoles:
    """Sessions of one client process, each with a CartPole (for a `Station`)."""

    def __init__(self, url: str, token: str, sessions: int, local: bool = False) -> None:
        name = secrets.token_hex(4)
        self._sessions = [_Carts(url, token, f"{name}-{its}", local, its) for its in range(sessions)]
        self._began, self._actions = False, dict[int, int]()

    def play(self, seconds: float, a_second: float = 0.0) -> tuple[float, list[float]]:
        """Plays; returns acknowledged turns a second, and round trips in seconds.

        Args:
            seconds: How long.
            a_second: Steps a second of each session; 0: as fast as it is answered.
        """
        ready = select.poll()
        by_number = {its.socket.fileno(): its for its in self._sessions}
        for number in by_number:
            ready.register(number, select.POLLIN)
        trips: list[float] = []
        actions = self._actions
        acknowledged: list[tuple[float, int]] = []
        if not self._began and not self._sessions[0].local:
            for its in self._sessions:
                its.exchange(0)
        self._began, began = True, time.perf_counter()
        while (now := time.perf_counter()) < began + seconds:
            for number, _ in ready.poll(0 if self._sessions[0].local else 1 if a_second else 50):
                its = by_number[number]
                for message in its.messages():
                    if message["type"] == "action" and not its.local:
                        trips.append(time.perf_counter() - its.sent_at)
                        actions[number] = message["action"]
                    elif message["type"] == "acknowledged":
                        acknowledged.append((now, sum(each.acknowledged for each in self._sessions)))
            for number, action in [*actions.items()]:
                its = by_number[number]
                if now >= its.due:
                    its.due = now + (1 - (now - its.phase) * a_second % 1) / a_second if a_second else 0.0
                    del actions[number]
                    its.exchange(action)
            if self._sessions[0].local:
                for its in self._sessions:
                    its.piece()
        (first, before), (last, after) = (acknowledged[0], acknowledged[-1]) if acknowledged else ((0.0, 0), (0.0, 0))
        turns = 1 - sum(its.ends for its in self._sessions) / sum(its.seq for its in self._sessions)
        return turns * (after - before) / max(1.0, last - first), trips
