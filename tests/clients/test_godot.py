"""The clients for Godot play through a real gateway and a network that cuts, each in its engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from urllib.parse import urlsplit

import numpy as np
import pytest
import yaml

from stagecoach.rollout_worker.gateway.tokens import add_token
from stagecoach.shared.protocol.heartbeat import Wait, poll
from tests.support.runs.external_run import learned, place_of, start
from tests.support.services.fault_proxy import FaultProxy
from tests.support.suite.speed import stretched

CLIENT = Path(__file__).parents[2] / "clients/godot"
pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

TURNS = """
extends SceneTree

var playing = 2

func _initialize():
	OS.low_processor_usage_mode_sleep_usec = 500
	for number in 2:
		play(number)

func play(number):
	var url = OS.get_environment("STAGECOACH_URL")
	var token = OS.get_environment("STAGECOACH_TOKEN")
	var session = load("res://client.gd").new(url, token, "s%d" % number, "journal-%d" % number)
	root.add_child(session)
	var observation = [number, int(OS.get_environment("FIRST"))]
	for episode in int(OS.get_environment("EPISODES")):
		session.reset(observation)
		for left in range((7 * episode) % 9, -1, -1):
			AWAIT_ACTION
			observation[1] += 1
			session.step(0.1, observation, left == 0)
			print("turn ", number, " ", observation[1] - 1)
		observation[1] += 1
	while session.pending() > 0:
		AWAIT_FRAME
	session.bye()
	AWAIT_END
	playing -= 1
	if playing == 0:
		quit(0)
"""
"""Plays two sessions; prints each turn once its outcome is in the journal."""

NUMBERS = """
extends SceneTree

func _initialize():
	var numbers = PARSED_NUMBERS
	for number in [9007199254740991, "a \\"quoted\\" ü", true, null, {"k": [0.5, -0.0]}]:
		numbers.append(number)
	print("numbers ", load("res://client.gd").to_text(numbers))
	quit(0)
"""


@dataclass(frozen=True)
class Engine:
    command: tuple[str, ...]
    suffix: str
    words: dict[str, str]
    """What stands for the capital words of the scripts above."""


ENGINES = {
    3: Engine(
        ("godot3-server",), "",
        {
            "AWAIT_ACTION": 'yield(session, "acted")', "AWAIT_FRAME": 'yield(self, "idle_frame")',
            "AWAIT_END": 'yield(session, "ended")', "PARSED_NUMBERS": 'parse_json(OS.get_environment("NUMBERS"))',
        },
    ),
    4: Engine(
        ("godot", "--headless"), "_4",
        {
            "AWAIT_ACTION": "await session.acted", "AWAIT_FRAME": "await process_frame",
            "AWAIT_END": "await session.ended",
            "PARSED_NUMBERS": 'JSON.parse_string(OS.get_environment("NUMBERS"))',
        },
    ),
}  # fmt: skip


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    found = ENGINES[request.param]
    if shutil.which(found.command[0]) is None:
        pytest.skip(f"needs {found.command[0]} (Debian has 3 as godot3-server, and 4 as godot from release 14 on)")
    return found


@contextmanager
def program(engine: Engine, folder: Path, script: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """Runs a script with the client next to it."""
    shutil.copy(CLIENT / f"stagecoach_client{engine.suffix}.gd", folder / "client.gd")
    for name, text in engine.words.items():
        script = script.replace(name, text)
    (folder / "script.gd").write_text(script)
    command = [*engine.command, "-s", "script.gd"]
    with subprocess.Popen(command, cwd=folder, env=os.environ | environ, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def lines(process: subprocess.Popen[str], first: str) -> list[str]:
    """Rests of the lines that begin with a word; waits for the program's end."""
    return [line[len(first) + 1 :] for line in process.communicate()[0].splitlines() if line.startswith(f"{first} ")]


def test_turns_are_learned_once_through_cuts_and_a_kill(engine: Engine, tmp_path: Path) -> None:
    run = start(tmp_path)
    place, token = urlsplit(place_of(run)), add_token(run.checkpoint_store().store, "robot")
    assert place.port is not None
    proxy = FaultProxy(place.port)
    url = f"ws://127.0.0.1:{proxy.port}{place.path}"

    access = {"STAGECOACH_URL": url, "STAGECOACH_TOKEN": token}
    with closing(proxy):
        with program(engine, tmp_path, TURNS, FIRST="0", EPISODES="1000000", **access) as killed:
            for cuts in range(20):
                time.sleep(0.2)
                proxy.cut() if cuts % 2 else proxy.cut_reply(10 * cuts)
            killed.kill()
            printed = lines(killed, "turn")
        with program(engine, tmp_path, TURNS, FIRST="1000000", EPISODES="60", **access) as second:
            while second.poll() is None:
                time.sleep(0.3)
                proxy.cut()
            assert second.returncode == 0
            printed += lines(second, "turn")
        assert proxy.cuts > 20
    run.stop()
    run.wait(60)
    counted, accounts = learned(run), run.status().ledger["total"]
    played = {(int(number), int(turn)) for number, turn in map(str.split, printed)}
    assert len(played) > 2 * 60
    late = accounts["dropped"].get("stale", {}).get("transitions", 0)
    assert set(counted.values()) == {1} and len(played - counted.keys()) <= late
    assert accounts["balances"]


def test_numbers_keep_their_kind_and_digits(engine: Engine, tmp_path: Path) -> None:
    """Whole numbers stay whole, and others equal to float32; Godot reads at most 18 digits."""
    draw = Random(1)
    numbers = [0, 1, -3, 0.1, -1e-7, 1e-30, 3.4e38, 1e15, 123456.789, 16777217, 0.30000001192092896]
    numbers += [draw.uniform(-1, 1) * 10.0 ** draw.randint(-30, 12) for _ in range(1000)]
    with program(engine, tmp_path, NUMBERS, NUMBERS=json.dumps(numbers)) as process:
        (text,) = lines(process, "numbers")
    *found, largest, quoted, true, null, nested = json.loads(text)
    assert (largest, quoted, true, null, nested) == (2**53 - 1, 'a "quoted" ü', True, None, {"k": [0.5, 0]})
    assert [type(its) for its in found[:3]] == [int] * 3
    assert np.array_equal(np.asarray(found, np.float32), np.asarray(numbers, np.float32))
    assert np.allclose(found, numbers, rtol=1e-12, atol=0)


def test_conformance_program_plays_and_reports_a_wrong_token(engine: Engine, tmp_path: Path) -> None:
    """The program of the conformance suite, against a real gateway."""
    run = start(tmp_path)
    token = add_token(run.checkpoint_store().store, "robot")
    for name in ("stagecoach_client", "conformance"):
        shutil.copy(CLIENT / f"{name}{engine.suffix}.gd", tmp_path)
    command = [*engine.command, "-s", f"conformance{engine.suffix}.gd"]
    environ = {"STAGECOACH_URL": place_of(run), "STAGECOACH_SESSION": "corridor", "STAGECOACH_EPISODES": "5"}
    for given, code in ((token, 0), ("wrong", 2)):
        env = os.environ | environ | {"STAGECOACH_TOKEN": given}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == code
    assert "unauthorized" in done.stderr.splitlines()
    run.stop()
    run.wait(60)
    assert run.status().ledger["total"]["consumed"]["transitions"] >= 5 * 5


@pytest.mark.learning
def test_example_is_learned(tmp_path: Path) -> None:
    """Of 16 stars of a game, an untrained policy catches two."""
    if shutil.which("godot3-server") is None:
        pytest.skip("needs Debian's godot3-server, which .ci/run installs")
    config = yaml.safe_load((CLIENT / "example/catcher.yaml").read_text())
    run = start(tmp_path, **{name: config[name] for name in ("environment", "algorithm", "rollout")})
    environ = {"STAGECOACH_URL": place_of(run), "STAGECOACH_TOKEN": add_token(run.checkpoint_store().store, "godot")}
    output = tmp_path / "output"

    def caught() -> float:
        reports = [line for line in output.read_text().splitlines() if line.endswith("stars caught")]
        return float(reports[-1].split()[-5]) if reports else 0.0

    command = ["godot3-server", "--path", str(CLIENT / "example")]
    with output.open("w") as file, subprocess.Popen(command, env=os.environ | environ, stdout=file) as game:
        try:
            poll(Wait("14 of 16 stars to be caught", stretched(200)), lambda: caught() > 14)
        finally:
            game.kill()
    run.stop()
    run.wait(60)
