"""Text from outside: whatever it holds, what is shown of it can be encoded, obeys no terminal, and has a bound."""

from __future__ import annotations

import io
import logging
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from stagecoach.coordinator.cli.terminal.console import PrintableConsole
from stagecoach.coordinator.lifecycle.preparation import create_flow
from stagecoach.shared.base.errors import PACKAGE
from stagecoach.shared.base.printable import complain, counted, printable, printable_data, score_in_words
from stagecoach.shared.protocol.events import emit, read_evaluations, read_events, record_evaluation
from stagecoach.shared.protocol.flow_control import RunState
from stagecoach.shared.protocol.heartbeat import Heartbeat, read_heartbeats
from stagecoach.shared.runtime.launch import LOGS, log_to_file
from tests.conftest import MakeRole, minimal_config

LOGGER = logging.getLogger("stagecoach.test")
HOSTILE = "\x1b]52;c;cm0gLXJm\x07\x9b31m\u202etxt\x00" + os.fsdecode(b"caf\xe9")
"""Sets a terminal's clipboard (OSC 52), colors it (C1), turns the direction, ends a C string, and is no UTF-8."""
COUNTED = re.compile(r"\} (episodes|workers|checkpoints|updates|versions|times|failures|things) (?!are wanted)")
ANY_TEXT = st.text(
    st.characters(codec=None, categories=None) | st.characters(min_codepoint=0xD800, max_codepoint=0xDFFF)
)


def harmless(text: str) -> bool:
    """Whether a terminal shows it as it is."""
    text.encode()
    return text.replace("\n", "").isprintable()


@given(ANY_TEXT, st.booleans())
def test_printable_changes_only_unprintable_text(text: str, lines: bool) -> None:
    shown = printable(text, lines=lines)
    assert harmless(shown.replace("\t", "") if lines else shown)
    assert lines or "\n" not in shown
    assert printable(shown, lines=lines) == shown
    assert (shown == text) == all(one.isprintable() or (lines and one in "\n\t") for one in text)


def test_printable_shortens_long_text_and_says_so() -> None:
    assert printable("x" * 2001) == "x" * 2000 + "… (1 more characters)"
    assert printable("x" * 2001, lines=True) == "x" * 2001
    assert len(printable("\x00" * 10**6)) < 10_000
    assert printable(f"worker-{'9' * 400} left") == f"worker-{'9' * 20}… (400 digits) left"
    assert printable("0" * 64) == "0" * 64, "a hash stays"
    assert printable_data({"\x1b": ["\x1b", ("\x1b", 1.5, None)]}) == {"\\x1b": ["\\x1b", ["\\x1b", 1.5, None]]}


def test_shared_records_accept_any_text(make_role: MakeRole) -> None:
    role = make_role(minimal_config())
    create_flow(role)
    emit(role.redis, role.run_id, HOSTILE, HOSTILE, **{HOSTILE: HOSTILE})
    (event,) = read_events(role.redis, role.run_id)
    (name,) = event.data
    record_evaluation(role.redis, role.run_id, "1_Step-1.ckpt", {"version": 1, "mean_return": 1.0, HOSTILE: HOSTILE})
    (scores,) = read_evaluations(role.redis, role.run_id).values()
    heartbeat = Heartbeat(role.redis, role.run_id, "worker", "worker-0")
    heartbeat.progress = {"at": HOSTILE}
    heartbeat.stop(HOSTILE)
    (beat,) = read_heartbeats(role.redis, role.run_id)
    role.flow.set_state(RunState.FINISHED, HOSTILE)
    reason = role.flow.read().reason
    told = [event.kind, event.text, name, event.data[name], *scores, beat.ended or "", beat.progress["at"], reason]
    assert all(map(harmless, map(str, told)))
    assert sum("caf\\udce9" in text for text in map(str, told)) == 8


def test_rejected_event_is_logged_only(
    redis_client: redis.Redis, unique_run_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    redis_client.set(f"stagecoach:{{{unique_run_id}}}:events", "somebody's own")
    emit(redis_client, unique_run_id, "worker", "joined")
    assert "Redis rejects the event 'joined'" in caplog.text


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """The folder of a run's logs, into which a role may `log_to_file` while a test runs."""
    (tmp_path / LOGS).mkdir()
    yield tmp_path / LOGS
    with suppress(OSError):
        log_to_file(None, "tests")
    logging.getLogger("stagecoach").propagate = True


def test_log_text_cannot_forge_a_record(log: Path) -> None:
    log_to_file(str(log.parent), "worker-0")
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        LOGGER.exception("it met %s\n2026-01-01 00:00:00,000 INFO stagecoach.trainer: all is well", HOSTILE)
    text = (log / "worker-0.log").read_text(encoding="utf-8")
    assert harmless(text) and text.count("caf\\udce9") == 2
    first, *rest = text.splitlines()
    assert "it met" in first and rest and all(line.startswith("    ") for line in rest)


def test_log_on_full_disk_is_reported_once(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (log / "worker-0.log").symlink_to("/dev/full")
    log_to_file(str(log.parent), "worker-0")
    for _ in range(3):
        LOGGER.warning("it is not written")
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "worker-0.log is not complete: its disk is full (No space left" in said


def test_role_log_is_rotated(log: Path) -> None:
    log_to_file(str(log.parent), "worker-0")
    for number in range(50_000):
        LOGGER.info("%d %s", number, "x" * 1000)
    files = sorted(log.iterdir())
    assert [path.name for path in files] == ["worker-0.log", *(f"worker-0.log.{n}" for n in (1, 2, 3))]
    assert all(path.stat().st_size <= 8 << 20 for path in files) and ": 49999 x" in files[0].read_text()


def test_console_and_complain_escape_text(capsys: pytest.CaptureFixture[str]) -> None:
    file = io.StringIO()
    console = PrintableConsole(file=file, width=200, force_terminal=False)
    table = Table("name", title=HOSTILE)
    table.add_row(f"[bold]{HOSTILE}[/red]")
    console.print(table)
    console.print(Panel(Text(HOSTILE), title=HOSTILE))
    console.print(f"{HOSTILE} [link=x]", soft_wrap=True)
    complain(HOSTILE)
    shown, said = file.getvalue(), capsys.readouterr().err
    assert harmless(shown) and harmless(said)
    colored = io.StringIO()
    ours = PrintableConsole(file=colored, force_terminal=True, color_system="standard")
    ours.print("ok\x1b[31m", style="green", highlight=False)
    assert colored.getvalue() == "\x1b[32mok\\x1b[31m\x1b[0m\n", "colors of our own reach a terminal"
    assert shown.count("caf\\udce9") == 5 and "[bold]" in shown and "[link=x]" in shown and "caf\\udce9" in said


def test_counted_uses_singular_for_one() -> None:
    numbers = (0, 1, 2, 1200, None)
    assert [counted(number, "episode") for number in numbers] == [
        "0 episodes", "1 episode", "2 episodes", "1,200 episodes", "– episodes",
    ]  # fmt: skip
    products = [path for folder in PACKAGE.iterdir() for path in folder.rglob("*.py")]
    plural = [f"{path.name}: {found}" for path in products for found in COUNTED.findall(path.read_text())]
    assert [line for line in plural if not line.startswith(("deployed_policy.py", "recording.py"))] == []


def test_score_in_words_lists_policies_sides_and_win_rates() -> None:
    scores: dict[str, Any] = {"mean_return": 0.0, "std_return": 0.0, "episodes": 20}
    assert score_in_words(scores | {"agents": {"agent": 0.0}}) == "0 ± 0 over 20 episodes"
    sides = {"agents": {"b": -1.5, "a": 1.5}, "policies": {"main": 0.0}}
    assert score_in_words(scores | sides) == "0 ± 0 (a 1.5, b -1.5) over 20 episodes"
    policies = {f"p{number}": float(number) for number in range(6)}
    assert score_in_words(scores | {"policies": policies}) == "0 ± 0 (p0 0, p1 1, p2 2, p3 3, …) over 20 episodes"
    won = {"win_rates": {"main/careful": 0.25, "main/random": 0.5, "other/random": 1.0}}
    rates = "; win rate of main 25% against careful, 50% against random; win rate of other 100% against random"
    told = f"0 ± 0 over 20 episodes{rates}"
    assert score_in_words(scores | won) == told
