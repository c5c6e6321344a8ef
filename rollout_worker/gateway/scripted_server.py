"""A gateway with a script, for one scenario of the conformance suite: it plays the corridor with one client program.

All of it is synchronous: a script says when a connection is accepted, read from, answered and cut.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol

from stagecoach.rollout_worker.environments.description import SINGLE_AGENT, describe_space
from stagecoach.rollout_worker.environments.space_data import data_of, space_of
from stagecoach.rollout_worker.gateway.messages import (
    PROTOCOL,
    Bye,
    EnvironmentStep,
    Hello,
    Refused,
    Reset,
    arrival,
    parse,
)
from stagecoach.shared.base import world
from stagecoach.shared.base.errors import UnsupportedSpace, UserError
from stagecoach.shared.experience.spaces import EnvironmentDescription, PolicySpaces

SPACES = {
    "observation": {"type": "Box", "low": 0.0, "high": 20.0, "shape": [2], "dtype": "float32"},
    "action": {"type": "Discrete", "n": 2, "start": 0},
}
_CORRIDOR = EnvironmentDescription(
    {SINGLE_AGENT: SINGLE_AGENT},
    {SINGLE_AGENT: PolicySpaces(*(describe_space(space_of(its, name)) for name, its in SPACES.items()))},
)
PATH, TOKEN, SESSION, EPISODES = "/v1/play", "0123456789abcdef" * 3, "arm-0", 2
_GOAL, _MOST_STEPS = 5, 20
_LOOK_SECONDS = 0.05
_BYTES = 2**16
_Turn = Reset | EnvironmentStep


class Nonconformance(Exception):
    """The client did something else than the protocol expects."""

    def __init__(self, expected: str, found: str) -> None:
        super().__init__(f"expected {expected}; got {found}")


def require(met: bool, expected: str, found: object) -> None:
    if not met:
        raise Nonconformance(expected, f"{found!s:.300}")


def _after(turn: _Turn, action: int) -> tuple[list[float], float, bool, bool]:
    """Returns what this action leads to: observation, reward, terminated, truncated."""
    position, steps = turn.observation
    position, steps = max(0, position + (1 if action else -1)), steps + 1
    return [position, steps], 0.5 * position, position == _GOAL, steps == _MOST_STEPS and position != _GOAL


def ends(turn: _Turn) -> bool:
    return isinstance(turn, EnvironmentStep) and bool(turn.terminated or turn.truncated)


class Stage:
    """One client program and all that a gateway knows of its session; closes both at the end."""

    def __init__(self, command: Sequence[str], folder: Path, seconds: float, journal: bool) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.next = self.settled = self.known = 0
        """The next message, the first that is not acknowledged, and the same as the client knows it."""
        self.turns: dict[int, _Turn] = {}
        self.answers: dict[int, tuple[int, int]] = {}
        """Message → action and version that the client was answered."""
        self.choose: Callable[[int], int] = lambda seq: int(seq % 4 != 2)
        self._acted = 0
        """The client has certainly received the answers to messages before this one."""
        self._until = world.monotonic() + seconds
        self._command, self._errors, self.journal = command, folder / "stderr", folder / "journal"
        self._environ = {
            **os.environ, "STAGECOACH_URL": f"ws://127.0.0.1:{self.listener.getsockname()[1]}{PATH}",
            "STAGECOACH_TOKEN": TOKEN, "STAGECOACH_SESSION": SESSION, "STAGECOACH_EPISODES": str(EPISODES),
        }  # fmt: skip
        self._environ.pop("STAGECOACH_JOURNAL", None)
        if journal:
            self._environ["STAGECOACH_JOURNAL"] = str(self.journal)
        self._links: list[Link] = []
        self.start()

    def start(self) -> None:
        """Starts the program; a second one begins a new episode, and plays all again."""
        with self._errors.open("wb") as errors:
            try:
                self._process = subprocess.Popen(
                    self._command, env=self._environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    stderr=errors, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise UserError(f"cannot start {self._command[0]}: {error.strerror or error}") from None
        self.left, self.begins, self.welcomed = EPISODES, True, False

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        self.kill()
        for link in self._links:
            link.socket.close()
        self.listener.close()

    def readable(self, source: socket.socket, what: str) -> None:
        """Blocks until there is something to read; raises `Nonconformance` if the program ends before."""
        while not select.select([source], [], [], _LOOK_SECONDS)[0]:
            self._close_links()
            require(world.monotonic() < self._until, what, "nothing in time")
            if (code := self._process.poll()) is not None and not select.select([source], [], [], 0)[0]:
                raise Nonconformance(what, f"the program ended with {code}: {self._said()}")

    def _close_links(self) -> None:
        for link in self._links:
            if link.closing:
                link.drain()

    def _said(self) -> str:
        return self._errors.read_text(errors="replace")[-300:].strip()

    def accept(self, what: str = "a connection") -> Link:
        """Accepts the next connection, without a word."""
        self.readable(self.listener, what)
        self._links.append(Link(self, self.listener.accept()[0]))
        return self._links[-1]

    def connect(self, **more: Any) -> Link:
        """Accepts the next connection and welcomes it; `more` are further fields of the welcome."""
        link = self.accept()
        link.shake_hands()
        link.take_hello()
        link.welcome(**more)
        return link

    def replace(self, known: int) -> None:
        """The gateway is replaced by one that knows only what was acknowledged, or has `known` in the run's log."""
        self.settled = self.next = known

    def finish(self, link: Link) -> None:
        """Plays to the end, acknowledges all, and expects a bye and exit code 0."""
        link.play()
        link.acknowledge(self.next)
        message = link.take_message("a bye, since all is acknowledged")
        require(isinstance(message, Bye), "a bye, since all is acknowledged", message)
        link.post({"type": "goodbye", "reason": "the session ends"})
        link.end(1000)
        self.exits(0)

    def exits(self, code: int, said: str = "") -> None:
        """Expects the program's end, with `said` on standard error, and no further connection."""
        what = f"exit code {code} without another connection"
        while self._process.poll() is None:
            require(world.monotonic() < self._until, what, "the program still runs")
            require(not select.select([self.listener], [], [], 0)[0], what, "another connection")
            self._close_links()
            world.sleep(_LOOK_SECONDS)
        require(not select.select([self.listener], [], [], 0)[0], what, "another connection")
        found = self._process.returncode
        require(found == code, what, f"exit code {found}: {self._said()}")
        require(said in self._said(), f"{said!r} on standard error", repr(self._said()))

    def check(self, turn: _Turn) -> None:
        """Checks a message of experience against the spaces, the corridor, and what was sent before."""
        seq = turn.seq
        arrival(turn, _CORRIDOR)
        if (before := self.turns.get(seq)) is not None:
            plain = {"action": None, "version": None}
            same = turn.model_copy(update=plain) == before.model_copy(update=plain)
            require(same, f"message {seq} as it was sent before, {before}", turn)
            answer, given = self.answers.get(seq), (turn.action, turn.version)
            fits = given == answer or (given == (None, None) and not (answer and seq < self._acted))
            require(fits, f"message {seq} with action and version {answer or 'absent'}", given)
            return
        require(turn.version is None, f"message {seq} without a version, as it was not answered", turn)
        last = self.turns.get(seq - 1)
        if self.begins or last is None or ends(last):
            require(isinstance(turn, Reset), f"message {seq} to begin an episode (reset)", turn)
            require(turn.observation == [0, 0], f"observation [0, 0] in message {seq}", turn.observation)
        else:
            self._acted = seq
            require(seq - 1 in self.answers, f"no message {seq} before {seq - 1} is answered", turn)
            expected = _after(last, self.answers[seq - 1][0])
            require(isinstance(turn, EnvironmentStep), f"message {seq} to be a step", turn)
            assert isinstance(turn, EnvironmentStep)
            found = turn.observation, turn.reward, turn.terminated, turn.truncated
            names = "(observation, reward, terminated, truncated)"
            require(found == expected, f"{names} = {expected} in message {seq}", found)
            info = {"steps": expected[0][1]}
            require(not ends(turn) or turn.info == info, f"info {info} in message {seq}", turn.info)
        require(self.left > 0, f"no episode after {EPISODES}", turn)
        self.begins = False
        self.turns[seq] = turn
        self.left -= ends(turn)


class Link:
    """One connection of the client."""

    def __init__(self, stage: Stage, connection: socket.socket) -> None:
        self.socket, self._stage = connection, stage
        self._protocol = ServerProtocol()
        self._texts: list[str] = []
        self._part: bytes | None = None
        self._request: Request | None = None
        self.pongs: list[bytes] = []
        self._ended = ""

    # Frames

    def _pump(self, what: str) -> None:
        require(not self._ended, what, self._ended)
        self._stage.readable(self.socket, what)
        self._read()

    def _read(self) -> None:
        try:
            data = self.socket.recv(_BYTES)
        except OSError as error:
            data, self._ended = b"", f"the connection ended: {error.strerror}"
        if data:
            self._protocol.receive_data(data)
        else:
            self._ended = self._ended or "the connection ended"
            self._protocol.receive_eof()
        for event in self._protocol.events_received():
            self._request = event if isinstance(event, Request) else self._request
            if isinstance(event, Frame):
                self._frame(event)
        self._flush()

    def _frame(self, frame: Frame) -> None:
        if frame.opcode is Opcode.PONG:
            self.pongs.append(bytes(frame.data))
        elif frame.opcode is Opcode.CLOSE:
            self._ended = self._ended or "the client closed the connection"
        elif frame.opcode is Opcode.BINARY:
            raise Nonconformance("a text message", "a binary one")
        elif frame.opcode in (Opcode.TEXT, Opcode.CONT):
            self._part = (self._part or b"") + bytes(frame.data)
            if frame.fin:
                self._texts.append(self._part.decode())
                self._part = None

    def _flush(self) -> None:
        with contextlib.suppress(OSError):  # what the client does then is seen at its next connection
            for data in self._protocol.data_to_send():
                self.socket.sendall(data) if data else self.socket.shutdown(socket.SHUT_WR)

    @property
    def closing(self) -> bool:
        return self._protocol.state is State.CLOSING or self._protocol.state is State.CLOSED

    def drain(self) -> None:
        """Reads what is there already, so that a close is answered."""
        while not self._ended and select.select([self.socket], [], [], 0)[0]:
            self._read()

    # Handshake

    def shake_hands(self, status: int = 101) -> None:
        """Answers the request for a WebSocket; any other status than 101 refuses it."""
        while self._request is None:
            self._pump("a request for a WebSocket")
        address = urlsplit(self._request.path)
        require(address.path == PATH, f"a request for {PATH}", address.path)
        tokens = self._request.headers.get("Authorization"), parse_qs(address.query).get("token")
        given = tokens in ((f"Bearer {TOKEN}", None), (None, [TOKEN]))
        require(given, "`Authorization: Bearer TOKEN`, or ?token=TOKEN", tokens)
        if status == 101:
            self._protocol.send_response(self._protocol.accept(self._request))
            require(self._protocol.handshake_exc is None, "a handshake of WebSocket 13", self._protocol.handshake_exc)
        else:
            self._protocol.send_response(self._protocol.reject(status, "not now\n"))
        self._flush()

    def take_hello(self) -> None:
        stage, hello = self._stage, self.take_message("a hello")
        if not isinstance(hello, Hello):
            raise Nonconformance("a hello", str(hello))
        require(hello.protocol == PROTOCOL, f"protocol {PROTOCOL}", hello.protocol)
        require(hello.session == SESSION, f"session {SESSION}", hello.session)
        if hello.spaces is not None:
            try:
                found = {name: data_of(space_of(its, name)) for name, its in hello.spaces.items()}
            except UnsupportedSpace as error:
                raise Nonconformance(f"spaces {SPACES}", str(error)) from None
            require(found == SPACES, f"spaces {SPACES}", found)
        kept = hello.journal_from
        if not stage.welcomed and stage.known == len(stage.turns):  # its journal is empty, or it has none
            require(kept is None or 0 < kept == stage.known, "journal_from null of a client without a journal", kept)
        else:
            require(kept == stage.known, f"journal_from {stage.known}, the oldest not acknowledged", kept)

    # Messages

    def take_message(self, what: str) -> Any:
        """Returns the next message, checked as a gateway does."""
        while not self._texts:
            self._pump(what)
        text = self._texts.pop(0)
        try:
            return parse(text)
        except Refused as error:
            raise Nonconformance(what, f"{text:.200}: {error}") from None

    def post(self, message: dict[str, Any], fragments: int = 1) -> None:
        if self._protocol.state is not State.OPEN:  # the client has closed it
            return
        data = json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode()
        size = -(-len(data) // fragments)
        for first in range(0, len(data), size):
            send = self._protocol.send_continuation if first else self._protocol.send_text
            send(data[first : first + size], fin=first + size >= len(data))
            if first + size < len(data):
                self._protocol.send_ping(b"between fragments")
        self._flush()

    def welcome(self, **more: Any) -> None:
        stage = self._stage
        self.post(
            {
                "type": "welcome", "protocol": PROTOCOL, "run": "conformance", "session": f"client/{SESSION}",
                "from": stage.settled, "next": stage.next, "spaces": SPACES, **more,
            }
        )  # fmt: skip
        stage.welcomed, stage.known = True, stage.settled

    def take(self) -> _Turn:
        """Returns the next message of experience, checked."""
        stage, what = self._stage, f"message {self._stage.next}"
        turn = self.take_message(what)
        require(isinstance(turn, Reset | EnvironmentStep) and turn.seq == stage.next, what, turn)
        try:
            stage.check(turn)
        except Refused as error:
            raise Nonconformance(what, f"{turn}: {error}") from None
        stage.next += 1
        found: _Turn = turn
        return found

    def take_through(self, seq: int) -> _Turn:
        """Takes messages of a journal, none of which is answered before all are there; returns the last."""
        while self._stage.next < seq:
            self.take()
        return self.take()

    def answer(self, turn: _Turn, fragments: int = 1, **more: Any) -> None:
        """Sends the action for a message, unless that ended its episode or has been answered."""
        if ends(turn) or turn.version is not None:
            return
        action, version = self._stage.choose(turn.seq), turn.seq // 3
        self._stage.answers[turn.seq] = action, version
        self.post({"type": "action", "seq": turn.seq, "action": action, "version": version, **more}, fragments)

    def play(self, messages: int | None = None, **more: Any) -> None:
        """Takes and answers so many messages, or all."""
        while self._stage.left or self._stage.next in self._stage.turns if messages is None else messages:
            self.answer(self.take(), **more)
            messages = None if messages is None else messages - 1

    def acknowledge(self, seq: int, **more: Any) -> None:
        self._stage.settled = self._stage.known = seq
        self.post({"type": "acknowledged", "seq": seq, **more})

    def ping(self) -> None:
        """Sends a ping, and expects its pong."""
        data = b"ping %d" % len(self.pongs)
        self._protocol.send_ping(data)
        self._flush()
        while data not in self.pongs:
            self._pump("a pong")

    def require_silence(self, seconds: float, what: str) -> None:
        until = world.monotonic() + seconds
        while world.monotonic() < until:
            self.drain()
            require(not self._texts and not self._ended, what, self._ended or self._texts)
            world.sleep(_LOOK_SECONDS)

    # Ends

    def end(self, code: int) -> None:
        """Closes the connection as WebSocket has it."""
        if self._protocol.state is State.OPEN:
            self._protocol.send_close(code)
            self._flush()

    def fail(self, error: str, code: int = 1008) -> None:
        self.post({"type": "error", "error": error, "message": f"the error {error} of a scenario"})
        self.end(code)

    def cut(self, half: dict[str, Any] | None = None) -> None:
        """Ends the connection without a close; in the middle of a message, if one is given."""
        if half is not None:
            data = json.dumps(half, separators=(",", ":")).encode()
            self._protocol.send_text(data[:9], fin=False)
            self._protocol.send_continuation(data[9:], fin=True)
            sent = b"".join(self._protocol.data_to_send())
            self.socket.sendall(sent[:-5])
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self._ended = "the connection was cut"
