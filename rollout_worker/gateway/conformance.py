"""The conformance suite of gateway clients: scenarios that a program plays (docs/reference/gateway_protocol.md).

Each starts the program, with a scripted gateway on loopback that checks all it sends.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from stagecoach.rollout_worker.gateway.scripted_server import Nonconformance, Stage, require
from stagecoach.shared.base import world
from stagecoach.shared.base.errors import UserError

_SECONDS = 45.0
"""Deadline of a scenario."""
_AT_A_TIME = 4
_SHORTEST_PAUSES, _GIVE_UP_SECONDS, _SLOW_SECONDS = 0.3, 15.0, 12.0


@dataclass(frozen=True)
class Result:
    scenario: str
    seconds: float
    problem: str = ""
    """Expected and actual behavior; empty if the client conforms."""


def play(stage: Stage) -> None:
    """Plays two episodes, one of them to its truncation, and leaves once all is acknowledged."""
    stage.choose = lambda seq: int(seq > 20)
    link = stage.connect()
    link.play()
    link.require_silence(0.3, "no message before all is acknowledged")
    stage.finish(link)


def fresh(stage: Stage) -> None:
    """A client without a journal continues where the session is, and ignores answers to messages it does not have."""
    stage.settled, stage.next = 40, 42
    link = stage.connect()
    link.post({"type": "action", "seq": 41, "action": 1, "version": 3})
    stage.finish(link)


def cut_received(stage: Stage) -> None:
    """A cut before the answer: the message has arrived, and its answer comes after the welcome."""
    link = stage.connect()
    link.play(2)
    turn = link.take()
    link.cut()
    link = stage.connect()
    link.answer(turn)
    stage.finish(link)


def cut_lost(stage: Stage) -> None:
    """A cut before the answer: the message was lost, and is sent again."""
    link = stage.connect()
    link.play(2)
    link.take()
    link.cut()
    stage.next -= 1
    stage.finish(stage.connect())


def cut_at_welcome(stage: Stage) -> None:
    """A cut between hello and welcome."""
    link = stage.accept()
    link.shake_hands()
    link.take_hello()
    link.cut()
    stage.finish(stage.connect())


def cut_in_message(stage: Stage) -> None:
    """A cut in the middle of an answer: what was received of it does not count."""
    link = stage.connect()
    link.play(2)
    turn = link.take()
    link.cut(half={"type": "action", "seq": turn.seq, "action": 1, "version": 1})
    link = stage.connect()
    link.answer(turn)
    stage.finish(link)


def cut_at_end(stage: Stage) -> None:
    """A cut while the client waits for acknowledgement; the last message was lost."""
    link = stage.connect()
    link.play()
    link.cut()
    stage.next -= 1
    stage.finish(stage.connect())


def replaced(stage: Stage) -> None:
    """A gateway that knows only what was acknowledged: the journal comes again, with its answers, in one go."""
    link = stage.connect()
    link.play(2)
    link.acknowledge(1)
    link.play(3)
    turn = link.take()
    link.cut()
    stage.replace(stage.settled)
    link = stage.connect()
    link.answer(link.take_through(turn.seq))
    stage.finish(link)


def from_beyond(stage: Stage) -> None:
    """A welcome whose `from` is beyond what was acknowledged: the client forgets what is before it."""
    link = stage.connect()
    link.play(4)
    turn = link.take()
    link.cut()
    stage.settled = 3
    link = stage.connect()
    link.answer(turn)
    turn = link.take()
    link.cut()
    link = stage.connect()
    link.answer(turn)
    stage.finish(link)


def acknowledged(stage: Stage) -> None:
    """Acknowledgements in the middle of a turn, of several messages, and twice."""
    link = stage.connect()
    link.play(3)
    turn = link.take()
    link.acknowledge(2)
    link.acknowledge(3)
    link.acknowledge(3)
    link.answer(turn)
    turn = link.take()
    link.cut()
    link = stage.connect()
    link.answer(turn)
    stage.finish(link)


def goodbye(stage: Stage) -> None:
    """A goodbye while an answer is due: the client connects again."""
    link = stage.connect()
    link.play(2)
    turn = link.take()
    link.post({"type": "goodbye", "reason": "this gateway ends; connect again later"})
    link.end(1000)
    link = stage.connect()
    link.answer(turn)
    stage.finish(link)


def taken_over(stage: Stage) -> None:
    """Another connection has continued the session: a goodbye together with an answer, which comes again later."""
    link = stage.connect()
    link.play(2)
    turn = link.take()
    link.answer(turn)
    for reason in ("another connection has continued this session", "it is over"):
        link.post({"type": "goodbye", "reason": reason})
    link.end(1000)
    link = stage.connect()
    link.answer(turn)
    stage.finish(link)


def _again(stage: Stage, error: str, code: int) -> None:
    link = stage.connect()
    link.play(2)
    turn = link.take()
    link.fail(error, code)
    link = stage.accept()
    link.shake_hands()
    link.take_hello()
    link.fail(error, code)
    link = stage.connect()
    link.answer(turn)
    stage.finish(link)


def away(stage: Stage) -> None:
    """The error `away` with 1013, in a turn and in place of a welcome: the client connects again."""
    _again(stage, "away", 1013)


def failed(stage: Stage) -> None:
    """The error `failed` with 1011, in a turn and in place of a welcome: the client connects again."""
    _again(stage, "failed", 1011)


def refused(stage: Stage) -> None:
    """Five handshakes are refused with 503: the client tries again, after growing pauses."""
    times = []
    for _ in range(5):
        stage.accept().shake_hands(503)
        times.append(world.monotonic())
    link = stage.connect()
    paused = world.monotonic() - times[0]
    require(paused > _SHORTEST_PAUSES, f"five pauses of more than {_SHORTEST_PAUSES} s together", f"{paused:.3f} s")
    stage.finish(link)


def unauthorized(stage: Stage) -> None:
    """A 401: exit code 2, `unauthorized` on standard error, no second connection."""
    stage.accept().shake_hands(401)
    stage.exits(2, "unauthorized")


def _final(stage: Stage, error: str, welcomed: bool) -> None:
    if welcomed:
        link = stage.connect()
        link.play(2)
        link.take()
    else:
        link = stage.accept()
        link.shake_hands()
        link.take_hello()
    link.fail(error)
    stage.exits(2, error)


def late_error(stage: Stage) -> None:
    """A final error right after an answer, so that the client learns of it with its next message."""
    link = stage.connect()
    link.play(2)
    link.answer(link.take())
    link.fail("revoked")
    stage.exits(2, "revoked")


def too_long(stage: Stage) -> None:
    """A message is longer than allowed, close code 1009: exit code 2, `too_long` on standard error, no reconnect."""
    link = stage.connect()
    link.play(2)
    link.take()
    link.end(1009)
    stage.exits(2, "too_long")


def unknown(stage: Stage) -> None:
    """Fields and types of messages that the client does not know are ignored, before the welcome too."""
    more: dict[str, Any] = {"later": {"type": "action"}, "reward": None}
    link = stage.accept()
    link.shake_hands()
    link.take_hello()
    link.post({"type": "notice", "seq": 0, "action": 1})
    link.welcome(**more)
    link.post({"type": "weather", "error": "none"})
    for _ in range(4):
        turn = link.take()
        link.post({"type": "progress", "seq": turn.seq, "action": [None], "version": 0})
        link.answer(turn, **more)
    link.acknowledge(2, **more)
    stage.finish(link)


def fragments(stage: Stage) -> None:
    """Messages in fragments, with pings between and after them; each ping is answered within 10 seconds."""
    link = stage.connect(note="ä" * 20)
    link.ping()
    for _ in range(3):
        turn = link.take()
        link.ping()
        link.answer(turn, fragments=3)
    link.play(fragments=2)
    stage.finish(link)


def long_welcome(stage: Stage) -> None:
    """A welcome of 200 KB."""
    stage.finish(stage.connect(note="x" * 200_000))


def late_duplicate(stage: Stage) -> None:
    """Answers come again late, and with another action: the first counts."""
    link = stage.connect()
    link.play(4)
    turn = link.take()
    for seq in (0, 2, 3):
        link.post({"type": "action", "seq": seq, "action": 1 - stage.answers[seq][0], "version": 99})
    link.answer(turn)
    turn = link.take()
    link.cut()
    stage.replace(0)
    link = stage.connect()
    link.answer(link.take_through(turn.seq))
    stage.finish(link)


def slow_answer(stage: Stage) -> None:
    """An answer after 12 seconds, with pings meanwhile: the client waits on the same connection."""
    link = stage.connect()
    link.play(1)
    turn = link.take()
    for _ in range(3):
        link.ping()
        link.require_silence(_SLOW_SECONDS / 3, "a client that waits for its answer")
    link.answer(turn)
    stage.finish(link)


def silent_handshake(stage: Stage) -> None:
    """A server that accepts, and never answers the handshake: the client gives up after 10 seconds."""
    _gives_up(stage, stage.accept)


def silent_hello(stage: Stage) -> None:
    """A gateway that never welcomes: the client gives up after 10 seconds."""

    def silent() -> None:
        link = stage.accept()
        link.shake_hands()
        link.take_hello()

    _gives_up(stage, silent)


def _gives_up(stage: Stage, silent: Callable[[], object]) -> None:
    silent()
    began = world.monotonic()
    link = stage.connect()
    took, what = world.monotonic() - began, f"another attempt after 10 s, at most {_GIVE_UP_SECONDS:g} s"
    require(5.0 < took < _GIVE_UP_SECONDS, what, f"one after {took:.1f} s")
    stage.finish(link)


def killed(stage: Stage) -> None:
    """A program that is killed in a turn, and at the end, continues its session from the journal's file."""
    link = stage.connect()
    link.play(3)
    turn = link.take()
    stage.kill()
    stage.start()
    link = stage.connect()
    link.answer(turn)
    link.play()
    stage.kill()
    stage.start()
    stage.finish(stage.connect())


def killed_and_replaced(stage: Stage) -> None:
    """The same, twice, with a gateway that has none of it, so that the whole journal comes again."""
    link = stage.connect()
    for _ in range(2):
        link.play(3)
        turn = link.take()
        stage.kill()
        stage.replace(0)
        stage.start()
        link = stage.connect()
        link.answer(link.take_through(turn.seq))
    stage.finish(link)


def old_journal(stage: Stage) -> None:
    """A journal's file that lacks its end, as after a power cut: the client counts on from `next`."""
    link = stage.connect()
    link.play(1)
    turn = link.take()
    kept = stage.journal.read_bytes()
    link.answer(turn)
    link.play(1)
    turn = link.take()
    stage.kill()
    stage.journal.write_bytes(kept)
    stage.start()
    link = stage.connect()
    link.answer(turn)
    stage.finish(link)


def restarted(stage: Stage) -> None:
    """A program whose journal's file is empty, since all was acknowledged, continues its session."""
    stage.finish(stage.connect())
    stage.start()
    stage.finish(stage.connect())


_JOURNALED = (killed, killed_and_replaced, old_journal, restarted)
_SCENARIOS = (
    silent_handshake, silent_hello, slow_answer, play, fresh, cut_received, cut_lost, cut_at_welcome, cut_in_message,
    cut_at_end, replaced, from_beyond, acknowledged, goodbye, taken_over, away, failed, refused, unauthorized,
    late_error, too_long, unknown, fragments, long_welcome, late_duplicate, *_JOURNALED,
)  # fmt: skip
_FINAL = {
    **dict.fromkeys(("hello", "protocol", "spaces", "elsewhere", "full", "revoked"), False),
    **dict.fromkeys(("message", "observation", "action", "reward", "gap", "turn", "not_known_yet"), True),
}
SCENARIOS: dict[str, tuple[str, Callable[[Stage], None]]] = {
    **{its.__name__: (str(its.__doc__), its) for its in _SCENARIOS},
    **{
        f"error_{name}": (f"The error `{name}` is final: exit code 2, and no second connection.",
                          partial(_final, error=name, welcomed=welcomed)) for name, welcomed in _FINAL.items()
    },
}  # fmt: skip


def run_scenario(name: str, command: Sequence[str]) -> Result:
    journal = name in {its.__name__ for its in _JOURNALED}
    began, problem = world.monotonic(), ""
    with (
        tempfile.TemporaryDirectory(prefix="stagecoach-conformance-") as folder,
        closing(Stage(command, Path(folder), _SECONDS, journal)) as stage,
    ):
        try:
            SCENARIOS[name][1](stage)
        except Nonconformance as error:
            problem = str(error)
    return Result(name, world.monotonic() - began, problem)


def run_suite(command: Sequence[str], only: Sequence[str] = ()) -> Iterator[Result]:
    """Yields each scenario's result, in their order; raises `UserError` for an unknown one."""
    if odd := sorted({*only} - SCENARIOS.keys()):
        raise UserError(f"no scenario is named {', '.join(odd)}; `stagecoach gateway conformance --list` has all")
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        yield from pool.map(lambda name: run_scenario(name, command), only or SCENARIOS)
