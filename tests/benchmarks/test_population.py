"""`python -m benchmarks.population`: its kills, and how it compares what ended."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import population
from benchmarks.population import Outcome, compared, play

COUNTS = """
import pathlib, subprocess, sys, time
lines = pathlib.Path(sys.argv[1], "lines")
helper = subprocess.Popen(["sleep", "60"], start_new_session=True)
while len(lines.read_text() if lines.exists() else "") < 40:
    with lines.open("a") as file:
        file.write(".")
    time.sleep(0.05)
with pathlib.Path(sys.argv[1], "starts").open("a") as file:
    file.write("end")
"""


class Counting:
    """Writes a mark for each update, and continues with those that are there."""

    def command(self, folder: Path) -> list[str]:
        with (folder / "starts").open("a") as file:
            file.write("start ")
        return [sys.executable, "-c", COUNTS, str(folder)]

    def updates(self, folder: Path) -> int:
        lines = folder / "lines"
        return len(lines.read_text()) if lines.exists() else 0

    def outcome(self, folder: Path) -> tuple[Any, dict[str, str]]:
        return (folder / "starts").read_text(), {"0": str(self.updates(folder))}


def test_play_kills_at_shares_of_progress_and_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(population, "UPDATES", 40)
    found = play(Counting(), tmp_path / "killed", 2)
    assert (found.ended, found.kills) == (True, 2)
    assert found.lineage == "start start start end" and int(found.policies["0"]) >= 40


def test_outcomes_are_compared_by_lineage_and_bytes() -> None:
    first = Outcome(True, [["a", 1]], {str(member): "x" for member in range(4)}, 1.0, 0)
    assert compared(first, first)["same lineage"] and compared(first, first)["same policies"] == "4 of 4"
    other = first._replace(lineage=[["a", 2]], policies=first.policies | {"2": "y"}, kills=3)
    assert compared(first, other) == {
        "kills": 3, "ended": True, "same lineage": False, "same policies": "3 of 4", "seconds": 1,
    }  # fmt: skip
    lost = Outcome(False, None, {}, 9.0, 1)
    assert not compared(lost, lost)["same lineage"] and compared(first, lost)["same policies"] == "0 of 4"
