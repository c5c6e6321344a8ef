"""The C++ client: compiled here, it plays through real gateways, with cuts and kills, and against a hostile server."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import SHUT_RDWR, create_server, socket
from typing import TYPE_CHECKING, Any

import pytest
from websockets.sync.server import ServerConnection, serve

from stagecoach.rollout_worker.gateway.tokens import add_token
from stagecoach.shared.config.loading import parse_yaml
from tests.support.runs.external_run import learned, place_of, start
from tests.support.services.fault_proxy import FaultProxy
from tests.support.suite.speed import stretched

if TYPE_CHECKING:
    from stagecoach.coordinator.run_access.run import Run

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "clients/cpp"
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Werror")
SANITIZED = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
pytestmark = [
    pytest.mark.processes, pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed"),
]  # fmt: skip


def compiled(source: Path, program: Path, *flags: str) -> Path:
    command = ["g++", "-std=c++17", "-O1", "-pthread", *WARNINGS, *flags, str(source), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return program


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(Path(__file__).with_name("turns.cpp"), tmp_path_factory.mktemp("turns") / "turns", *SANITIZED)


@pytest.fixture(scope="module")
def corridor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(CLIENT / "conformance.cpp", tmp_path_factory.mktemp("corridor") / "corridor", *SANITIZED)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = start(tmp_path)
    yield run
    end(run)


def end(run: Run) -> None:
    run.stop()
    run.wait(60)


def token_of(run: Run) -> str:
    return add_token(run.checkpoint_store().store, "robot")


def late(run: Run) -> int:
    total: dict[str, Any] = run.status().ledger["total"]
    assert total["balances"]
    return int(total["dropped"].get("stale", {}).get("transitions", 0))


def test_cuts_of_the_connection_repeat_no_turn(run: Run, turns: Path, tmp_path: Path) -> None:
    token, place = token_of(run), place_of(run)
    found = re.search(r":(\d+)/", place)
    assert found
    proxy, draw = FaultProxy(int(found[1])), random.Random(0)
    url = place.replace(found[1], str(proxy.port))
    playing = [
        subprocess.Popen(
            [str(turns), url, token, str(seed), str(tmp_path / f"{seed}.jsonl") if seed else "", str(seed), "0", "60",
             str(stretched(120))], stdout=subprocess.PIPE, text=True
        )
        for seed in range(2)
    ]  # fmt: skip
    while any(each.poll() is None for each in playing):
        time.sleep(draw.uniform(0.05, 0.5))
        proxy.cut_reply(draw.randrange(60)) if draw.random() < 0.5 else proxy.cut()
        if proxy.cuts > 30:
            proxy.heal()
            break
    played = {(seed, int(turn)) for seed, each in enumerate(playing) for turn in each.communicate()[0].split()}
    assert [each.returncode for each in playing] == [0, 0]
    proxy.close()
    end(run)
    counted = learned(run)
    assert proxy.cuts >= 5 and set(counted.values()) == {1} and counted.keys() <= played
    assert len(counted) + late(run) == len(played)


def test_journal_file_continues_killed_program(run: Run, turns: Path, tmp_path: Path) -> None:
    token, place, journal, kills = token_of(run), place_of(run), tmp_path / "journal.jsonl", 6
    played, draw, first = set[int](), random.Random(0), 0
    for kill in range(kills + 1):
        episodes = "10" if kill == kills else "100000"
        command = [str(turns), place, token, "0", str(journal), "0", str(first), episodes, str(stretched(60))]
        program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        if kill < kills:
            time.sleep(draw.uniform(0.5, 1.5))
            program.kill()
        printed = [int(turn) for turn in program.communicate()[0].splitlines()]
        assert printed
        played.update(printed)
        first = printed[-1] + 1000
        if kill == 1:  # the end of a file that was being written
            with journal.open("a") as file:
                file.write('{"seq": 99999, "type": "st')
    assert program.returncode == 0 and journal.read_text() == ""
    end(run)
    counted = learned(run)
    turned = {turn for _, turn in counted}
    assert set(counted.values()) == {1} and len(turned - played) <= kills
    assert len(played - turned) <= late(run) <= len(played - turned) + kills


def play_corridor(corridor: Path, url: str, token: str, session: str, **more: str) -> subprocess.CompletedProcess[str]:
    variables = {"URL": url, "TOKEN": token, "SESSION": session, "EPISODES": "5", **more}
    environment = {**os.environ, **{f"STAGECOACH_{name}": value for name, value in variables.items()}}
    limit = stretched(100)
    return subprocess.run([corridor], env=environment, capture_output=True, text=True, timeout=limit, check=False)


def test_corridor_is_played_and_refusals_exit_with_code(run: Run, corridor: Path, tmp_path: Path) -> None:
    token, place, journal = token_of(run), place_of(run), tmp_path / "journal.jsonl"
    done = play_corridor(corridor, place, token, "0", JOURNAL=str(journal))
    assert (done.returncode, done.stderr, journal.read_text()) == (0, "", "")
    for bad, session, code in (("wrong", "0", "unauthorized"), (token, "a/b", "message")):
        done = play_corridor(corridor, place, bad, session)
        assert (done.returncode, done.stderr) == (2, code + "\n")
    done = play_corridor(corridor, place.replace("ws:", "wss:"), token, "0")
    assert done.returncode == 1 and "stunnel" in done.stderr


def test_program_of_the_readme_compiles(tmp_path: Path) -> None:
    (tmp_path / "corridor.cpp").write_text((CLIENT / "README.md").read_text().split("```cpp\n")[1].split("```")[0])
    compiled(tmp_path / "corridor.cpp", tmp_path / "corridor", f"-I{CLIENT}")


@pytest.mark.learning
def test_pendulum_example_learns_to_swing_up(tmp_path: Path) -> None:
    """It is at about -150 after 8,000 steps; planning with the equations known reaches -139."""
    program = compiled(CLIENT / "example/pendulum.cpp", tmp_path / "pendulum", "-O2")
    config = parse_yaml((CLIENT / "example/pendulum.yaml").read_text(), "pendulum.yaml")
    run = start(tmp_path, **config | {"gateway": {"port": 0}})
    command = [str(program), place_of(run), token_of(run), "4", "15"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=stretched(350), check=True)
    end(run)
    first, *_, last = (float(line.split()[-1]) for line in done.stdout.splitlines())
    assert first < -700 and last > -250, done.stdout


# A server that sends nonsense

WELCOME = {"type": "welcome", "protocol": 1, "run": "r", "session": "s", "from": 0, "next": 0, "spaces": {}}


def frame(payload: bytes | str | dict[str, Any], first: int = 0x81) -> bytes:
    data = json.dumps(payload) if isinstance(payload, dict) else payload
    data = data.encode() if isinstance(data, str) else data
    if len(data) < 126:
        return bytes([first, len(data)]) + data
    return bytes([first, 126]) + len(data).to_bytes(2, "big") + data


HOSTILE = {
    "nothing": b"", "reserved bits": b"\xf1\x01a", "masked": b"\x81\x81abcde", "unknown kind": b"\x83\x01a",
    "huge": b"\x81\x7f" + b"\xff" * 8, "larger than allowed": b"\x81\x7f" + (1 << 30).to_bytes(8, "big"),
    "parts larger than allowed": b"".join(frame("x" * 60000, 0 if part else 1) for part in range(300)),
    "no first part": frame("a", 0x80), "two first parts": frame("a", 1) + frame("b", 1),
    "long ping": b"\x89\x7e\x00\xff" + b"a" * 255, "ping in parts": b"\x09\x01a", "pings": frame("a", 0x89) * 20000,
    "close": frame(b"\x03\xe8", 0x88), "bad close": frame(b"\x03", 0x88), "binary": frame(b"\xff", 0x82),
    "not UTF-8": frame(b'{"type": "\xc0\xaf"}'), "surrogate": frame(b'{"type": "\xed\xa0\x80"}'),
    "cut UTF-8": frame(b'{"type": "\xf0\x9f"}'), "empty": frame(""), "blank": frame("  "), "NUL": frame(b"\x00"),
    "no JSON": frame("hello"), "half": frame('{"type"'), "array": frame("[]"), "text": frame('"welcome"'),
    "deep": frame("[" * 60000), "deep objects": frame('{"a":' * 10000), "half escape": frame('{"a": "\\u12'),
    "half pair": frame('{"type": "\\ud800"}'), "bad escape": frame('{"type": "\\x"}'), "minus": frame('{"type": -}'),
    "huge number": frame('{"type": 1e999}'), "NaN": frame('{"type": NaN}'), "rest": frame('{"type": "x"} 1'),
    "no type": frame({"a": 1}), "no numbers": frame({"type": "welcome"}), "text number": frame(WELCOME | {"next": "1"}),
    "negative": frame(WELCOME | {"next": -1}), "from beyond": frame(WELCOME | {"from": 5}),
    "last number": frame(WELCOME | {"next": 2**63 - 1}), "no number of 64 bits": frame(WELCOME | {"next": 2**64}),
    "unknown types": frame({"type": "news"}) * 20000, "error without code": frame({"type": "error"}),
    "acknowledges all": frame(WELCOME) + frame({"type": "acknowledged", "seq": 2**62}),
    "acknowledges negative": frame(WELCOME) + frame({"type": "acknowledged", "seq": -(2**63)}),
    "forgets what is open": frame(WELCOME) + frame({"type": "acknowledged", "seq": 0}) * 3,
    "answers without action": frame(WELCOME) + frame({"type": "action", "seq": 0, "version": 1}),
    "answers others": frame(WELCOME) + frame({"type": "action", "seq": 2**63 - 1, "action": {}, "version": -1}),
    "two welcomes": frame(WELCOME) + frame(WELCOME | {"from": 7, "next": 9}),
    "goodbyes": (frame(WELCOME) + frame({"type": "goodbye"})) * 3, "cut": frame(WELCOME)[:20],
}  # fmt: skip
HANDSHAKES = {
    "nothing": b"", "not HTTP": b"hello\r\n\r\n", "no end": b"HTTP/1.1 101 " + b"a" * 100_000, "short": b"\r\n\r\n",
    "status": b"HTTP/1.1 503 Busy\r\n\r\n", "no proof": b"HTTP/1.1 101 OK\r\n\r\n", "zeros": b"\x00" * 70_000,
    "wrong proof": b"HTTP/1.1 101 OK\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n",
}  # fmt: skip


class HostileServer:
    """Answers each connection with the same bytes, after a handshake unless they replace it."""

    def __init__(self, said: bytes, handshake: bool) -> None:
        self._said, self._handshake = said, handshake
        self._listener = create_server(("127.0.0.1", 0))
        self.url = f"ws://127.0.0.1:{self._listener.getsockname()[1]}/v1/play"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(SHUT_RDWR)  # wakes `accept`
        self._thread.join(10)
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with connection, suppress(OSError):
                    self._answer(connection)

    def _answer(self, connection: socket) -> None:
        connection.settimeout(5)
        asked = b""
        while b"\r\n\r\n" not in asked and (piece := connection.recv(4096)):
            asked += piece
        if self._handshake:
            key = asked.partition(b"Sec-WebSocket-Key: ")[2].partition(b"\r\n")[0]
            proof = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
            connection.sendall(b"HTTP/1.1 101 OK\r\nsec-websocket-accept:" + proof + b"\r\n\r\n")
        connection.sendall(self._said)
        while connection.recv(4096):
            pass


@contextmanager
def hostile(said: bytes, handshake: bool = True) -> Iterator[str]:
    server = HostileServer(said, handshake)
    yield server.url
    server.close()


def outcome(turns: Path, url: str, patience: float) -> tuple[int, str]:
    command = [str(turns), url, "token", "0", "", "0", "0", "1", str(patience)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=stretched(60), check=False)
    assert "Sanitizer" not in done.stderr and "runtime error" not in done.stderr, done.stderr
    return done.returncode, done.stderr


@pytest.mark.parametrize("case", HOSTILE)
def test_nonsense_of_a_server_ends_in_an_error(turns: Path, case: str) -> None:
    with hostile(HOSTILE[case]) as url:
        code, text = outcome(turns, url, 0.3)
    assert (code, "no answer in time" in text) == (3, True) or (code, text[:8]) == (2, "session:"), text


@pytest.mark.parametrize("case", HANDSHAKES)
def test_nonsense_for_a_handshake_ends_in_an_error(turns: Path, case: str) -> None:
    with hostile(HANDSHAKES[case], handshake=False) as url:
        assert outcome(turns, url, 0.3)[0] == 3


def test_unknown_fields_parts_and_pings_are_accepted(turns: Path) -> None:
    """Everything that WebSockets and the protocol allow: parts, pings in between, binary messages, unknown types."""
    asked, pongs = list[dict[str, Any]](), list[bool]()

    def answer(connection: ServerConnection) -> None:
        for text in connection:
            message = json.loads(text)
            asked.append(message)
            reply = {"type": "action", "seq": message.get("seq"), "version": 1, "action": [-0.0, {"a": 1e-3}]}
            said = json.dumps(reply)
            if message["type"] == "hello":
                said = json.dumps(WELCOME | {"new": [{"b": None}, "\N{GRINNING FACE}\n"]}, ensure_ascii=False)
            elif message.get("terminated"):
                said = json.dumps({"type": "acknowledged", "seq": message["seq"] + 1, "new": 1}, indent=1)
            connection.send(json.dumps({"type": "news", "\N{GRINNING FACE}": "\ud83d"}))
            connection.send(b"\xff")
            pongs.append(connection.ping().wait(stretched(10)))
            connection.send([said[:5], "", said[5:9], said[9:]])

    with serve(answer, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever).start()
        code, text = outcome(turns, f"ws://127.0.0.1:{server.socket.getsockname()[1]}/", stretched(30))
    assert (code, text) == (0, "") and all(pongs)
    assert [each["type"] for each in asked[:2]] == ["hello", "reset"] and asked[-1]["type"] == "bye"
