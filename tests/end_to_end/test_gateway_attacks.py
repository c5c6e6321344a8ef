"""Clients with a token that do harm: they cost themselves alone, and another client plays on meanwhile."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from benchmarks.kit.station import Station
from stagecoach.rollout_worker.gateway.tokens import add_token
from stagecoach.shared.storage.log_archive import read_experience
from tests.support.runs.external_run import CHOICE, client_module, place_of, start, total
from tests.support.suite.speed import stretched

if TYPE_CHECKING:
    from stagecoach.coordinator.run_access.run import Run

pytestmark = [pytest.mark.timeout(600), pytest.mark.nightly]
SECONDS, THREADS, SLOTS = 1.5, 3, 16
SPACES = {"observation": {"type": "Box", "low": -1e9, "high": 1e9, "shape": [4]}, "action": CHOICE}


class Victim:
    """A client that plays well, in a process of its own."""

    def __init__(self, url: str, token: str) -> None:
        self._session = client_module("stagecoach_client").Session(url, token, "well")
        self._session.reset([0, 0, 0, 0])
        self._session.step(1.0, [0, 0, 0, 0])

    def play(self, seconds: float) -> list[float]:
        """Returns the round trips."""
        until, trips = time.monotonic() + seconds, []
        while time.monotonic() < until:
            began = time.perf_counter()
            self._session.step(1.0, [0, 0, 0, 0])
            trips.append(time.perf_counter() - began)
            time.sleep(0.002)
        return trips

    def settle(self) -> int:
        self._session.step(1.0, [0, 0, 0, 0], True)
        left: int = self._session.settle(stretched(60))
        return left


OPEN: list[socket.socket] = []
"""Connections of the present attack."""


def dial(url: str) -> socket.socket:
    place = urlsplit(url)
    OPEN.append(socket.create_connection((str(place.hostname), int(place.port or 0)), 5))
    return OPEN[-1]


class Wire:
    """A connection whose bytes are written by hand."""

    def __init__(self, url: str, token: str, extension: str = "", name: str | None = "evil", **fields: Any) -> None:
        place = urlsplit(url)
        self.socket = dial(url)
        head = [
            f"GET {place.path} HTTP/1.1", f"Host: {place.netloc}", "Upgrade: websocket", "Connection: Upgrade",
            "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", "Sec-WebSocket-Version: 13",
            f"Authorization: Bearer {token}",
        ]  # fmt: skip
        self.socket.sendall("\r\n".join([*head, *([extension] if extension else []), "", ""]).encode())
        if b" 101 " not in self.socket.recv(4096):
            raise ConnectionError("refused")
        if name is not None:
            self.say({"type": "hello", "protocol": 1, "session": name, **fields})

    def frame(self, body: bytes, kind: int = 1, first: int = 0x80, mask: bytes | None = bytes(4)) -> None:
        bit = 0 if mask is None else 0x80
        size = len(body)
        length = bytes([bit | size]) if size < 126 else bytes([bit | 127]) + struct.pack(">Q", size)
        self.socket.sendall(bytes([first | kind]) + length + (mask or b"") + body)

    def say(self, message: Any) -> None:
        self.frame((message if isinstance(message, str) else json.dumps(message)).encode())

    def told(self, kind: str) -> dict[str, Any]:
        """Reads until a message of this type comes."""
        data = b""
        while (at := data.find(f'{{"type":"{kind}"'.encode())) < 0 or b"}" not in data[at:]:
            if not (more := self.socket.recv(1 << 16)):
                raise ConnectionError("closed")
            data += more
        found: dict[str, Any] = json.JSONDecoder().raw_decode(data[at:].decode(errors="replace"))[0]
        return found

    def joined(self) -> int:
        """Returns the number of the next message."""
        return int(self.told("welcome")["next"])


def own() -> str:
    return f"evil-{threading.get_ident() % 1000}"


def idle(url: str, token: str, name: str | None = None) -> None:
    with suppress(OSError):
        for _ in range(60):
            Wire(url, token, name=name)
        time.sleep(SECONDS)


def raw(data: Callable[[], bytes], pause: float = 0.0, each: int = 1 << 20) -> Any:
    def attack(url: str, token: str) -> None:
        plain, body = dial(url), data().replace(b"TOKEN", token.encode())
        for at in range(0, len(body), each):
            plain.sendall(body[at : at + each])
            time.sleep(pause)
        plain.recv(100)

    return attack


def joined(*messages: Any, reads: bool = True, **fields: Any) -> Any:
    """Sends these again and again, with their own `seq`, after a hello."""

    def attack(url: str, token: str) -> None:
        wire = Wire(url, token, name=own(), **fields)
        seq, until = wire.joined(), time.monotonic() + SECONDS
        while time.monotonic() < until:
            for message in messages:
                made = message(seq) if callable(message) else message
                wire.say(made)
                seq += isinstance(made, dict) and "seq" in made
            if reads:
                wire.socket.setblocking(False)
                with suppress(BlockingIOError):
                    wire.socket.recv(1 << 20)
                wire.socket.settimeout(5)

    return attack


def framed(body: Callable[[Wire], None], times: int = 10**9, **fields: Any) -> Any:
    """Sends frames after the handshake."""

    def attack(url: str, token: str) -> None:
        wire, until = Wire(url, token, name=own(), **fields), time.monotonic() + SECONDS
        for _ in range(times):
            body(wire)
            if time.monotonic() > until:
                break
        wire.socket.settimeout(SECONDS)
        wire.socket.recv(100)

    return attack


def reset(seq: int, seen: Any = (0, 0, 0, 0)) -> dict[str, Any]:
    return {"type": "reset", "seq": seq, "observation": seen}


def episode(info: Callable[[int], dict[str, Any]]) -> list[Any]:
    """An episode of one step, that waits for no answer."""
    given = {"action": 1, "version": 0}
    step = {"type": "step", "reward": 1, "observation": [0] * 4, "terminated": True}
    return [lambda seq: reset(seq) | given, lambda seq: step | {"seq": seq, "info": info(seq)}]


def bomb(wire: Wire) -> None:
    pressed = zlib.compressobj(wbits=-12)
    wire.frame(pressed.compress(b" " * 50_000_000) + pressed.flush(zlib.Z_SYNC_FLUSH)[:-4], first=0xC0)


def slow(wire: Wire) -> None:
    wire.socket.sendall(b"\x81\xff" + struct.pack(">Q", 900_000))
    time.sleep(1)


def fragments(wire: Wire) -> None:
    wire.frame(b"", first=0)
    while True:
        wire.socket.sendall(b"\x00\x80\x00\x00\x00\x00" * 1000)


def takeovers(url: str, token: str) -> None:
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        one, other = Wire(url, token, name=own()), Wire(url, token, name=own())
        for wire in (one, other, one):
            with suppress(OSError):
                wire.say(reset(0))


def names(url: str, token: str) -> None:
    until, number = time.monotonic() + SECONDS, 0
    while time.monotonic() < until:
        Wire(url, token, name=f"{own()}-{number}").say({"type": "bye"})
        number += 1


def policies(url: str, token: str) -> None:
    for _ in range(100):
        dial(url).sendall(
            f"GET /v1/policy/default HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
        )
    time.sleep(SECONDS)


HEAD = b"GET /v1/play HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer TOKEN\r\n"
DEFLATE = "Sec-WebSocket-Extensions: permessage-deflate"
ATTACKS: dict[str, Callable[[str, str], None]] = {
    "no hello": idle, "same session many times": lambda url, token: idle(url, token, own()),
    "slow header": raw(lambda: HEAD * 3, 0.02, 4), "long header": raw(lambda: HEAD + b"X: " + b"x" * 500_000),
    "half a request": raw(lambda: HEAD), "nonsense": raw(lambda: os.urandom(200_000)),
    "pipelined requests": raw(lambda: (HEAD.replace(b"play", b"policy/x") + b"\r\n") * 2000),
    "guessed tokens": raw(lambda: b"GET /v1/policy/x?token=no HTTP/1.1\r\nHost: x\r\n\r\n" * 500),
    "policies that nobody reads": policies,
    "no mask": framed(lambda wire: wire.frame(b"{}", mask=None)),
    "reserved bits": framed(lambda wire: wire.frame(b"{}", first=0xB0)),
    "unknown kind of frame": framed(lambda wire: wire.frame(b"{}", kind=7)),
    "length of 2^62": framed(lambda wire: wire.socket.sendall(b"\x81\xff" + struct.pack(">Q", 2**62) + bytes(9)), 1),
    "slow frame": framed(slow), "empty fragments": framed(fragments),
    "pings": framed(lambda wire: wire.socket.sendall((b"\x89\xfd" + bytes(129)) * 500)),
    "pongs": framed(lambda wire: wire.socket.sendall((b"\x8a\xfd" + bytes(129)) * 500)),
    "compression bomb": framed(bomb, extension=DEFLATE),
    "bad close": framed(lambda wire: wire.frame(b"\x00\x01x", kind=8)),
    "invalid UTF-8": framed(lambda wire: wire.frame(b"\xff\xfe")),
    "binary": framed(lambda wire: wire.frame(bytes(900_000), kind=2)),
    "deep JSON": joined("[" * 400_000), "wide JSON": joined(json.dumps({str(key): key for key in range(60_000)})),
    "long integer": joined('{"type":"reset","seq":' + "9" * 900_000 + "}"),
    "long text": joined(lambda seq: reset(seq, "x" * 900_000)),
    "large observation": joined(lambda seq: reset(seq, [[0.5] * 10] * 20_000)),
    "NaN": joined('{"type":"reset","seq":0,"observation":[NaN,0,0,0]}'), "gap": joined(lambda seq: reset(seq + 7)),
    "resets": joined(reset, reads=False), "one message again and again": joined(lambda seq: reset(0), reads=False),
    "large info": joined(*episode(lambda seq: {"text": "x" * 900_000})),
    "a million metrics": joined(*episode(lambda seq: {f"{seq}-{number}": 1 for number in range(2000)})),
    "long metrics": joined(*episode(lambda seq: {f"{seq}" + "x" * 100_000: 1})),
    "versions that nobody has": joined(lambda seq: reset(seq) | {"action": 0, "version": 2**50}, acting="local"),
    "takeovers": takeovers, "names of sessions": names,
}  # fmt: skip


def resident(run: Run) -> tuple[int, float]:
    """Returns the gateway's process, and its MB."""
    pid = next(beat.pid for beat in run.status(accounting=False).roles if beat.role == "worker")
    return pid, int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6


def test_attacks_cost_other_clients_little(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = start(
        tmp_path, inline=False,
        environment={"id": "mine", "api": "external", "num_envs": SLOTS, "spaces": SPACES},
        rollout={"workers": 1, "fragment_steps": 64, "fragments_per_update": 1},
        algorithm={"name": "ppo", "minibatch_size": 1024, "epochs": 1},
    )  # fmt: skip
    store, url = run.checkpoint_store().store, place_of(run)
    token, lines = add_token(store, "evil"), list[str]()
    victim = Station(Victim, url, add_token(store, "good"))
    quiet = np.array(victim.call("play", 3.0)) * 1000
    pid, before = resident(run)
    for name, attack in {"": lambda *_: time.sleep(SECONDS), **ATTACKS}.items():

        def one(attack: Callable[[str, str], None] = attack) -> None:
            until = time.monotonic() + SECONDS
            while time.monotonic() < until:
                with suppress(OSError, ConnectionError):
                    attack(url, token)

        victim.begin("play", SECONDS + 0.5)
        threads = [threading.Thread(target=one) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(stretched(60))
        while OPEN:
            OPEN.pop().close()
        trips = np.array(victim.answer()) * 1000
        now, size = resident(run)
        lines.append(
            f"{name:28} {len(trips):4} turns, p50 {np.median(trips):6.1f} ms, most {trips.max():7.0f}; {size:.0f} MB"
        )
        with capsys.disabled():
            print(lines[-1], flush=True)
        assert now == pid, f"the gateway lives on: {name}"
        assert np.median(trips) < stretched(250), (np.median(quiet), lines[-1])
        assert trips.max() < stretched(6000), "at most the five seconds that a fragment waits for an outcome"
    assert victim.call("settle") == 0
    victim.close()
    assert resident(run)[1] < before + 120
    run.stop()
    run.wait(60)
    assert total(run)["balances"]
    records = [
        record for fragment in read_experience(run.folder.path / "s3" / "stagecoach" / run.run_id)
        for record in fragment.header.episodes
    ]  # fmt: skip
    assert 0 < len({name for record in records for name in record.metrics}) <= 32
    log = (run.folder.path / "logs" / "worker-0.log").read_text()
    assert len(log.splitlines()) < 200, log[-2000:]
