"""An environment that numbers its steps, and a client of a gateway that plays it: `python -m
benchmarks.contest.programs.numbered_steps FOLDER URL TOKEN remote|local`, until it is killed."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

SCALE, PACE_SECONDS = 2.0**20, 0.01


class NumberedSteps:
    """Episodes of 20 to 200 steps whose observations are numbers; `taken.txt` gets each step once it is taken."""

    def __init__(self, folder: Path) -> None:
        path = folder / "taken.txt"
        taken = path.read_text().split("\n")[:-1] if path.exists() else []
        self._at, self._left = int(taken[-1]) + 1 if taken else 0, 0
        self._file = path.open("a", buffering=1)

    def reset(self) -> list[float]:
        """Begins an episode."""
        self._at += 1
        self._left = Random(self._at).randint(20, 200)
        return [self._at / SCALE, 0.0, 0.0, 0.0]

    def step(self) -> tuple[list[float], bool]:
        """Takes a step; returns the observation, and whether the episode has ended."""
        time.sleep(PACE_SECONDS)
        self._file.write(f"{self._at}\n")
        self._at, self._left = self._at + 1, self._left - 1
        return [self._at / SCALE, 0.0, 0.0, 0.0], self._left == 0


def number_of(observation: Any) -> int:
    """Returns the number of the step that was taken from an observation."""
    return round(float(observation[0]) * SCALE)


def play(folder: Path, url: str, token: str, acting: str) -> None:
    """Plays with the reference client, until it is killed."""
    sys.path.insert(0, str(Path(__file__).parents[3] / "clients" / "python"))
    client, policy = importlib.import_module("stagecoach_client"), None
    if acting == "local":
        policy = importlib.import_module("stagecoach_policy").Policy
    world, session = NumberedSteps(folder), client.Session(url, token, "one", journal=folder / "journal", policy=policy)
    while True:
        session.reset(world.reset())
        over = False
        while not over:
            seen, over = world.step()
            session.step(1.0, seen, over)


if __name__ == "__main__":
    play(Path(sys.argv[1]), *sys.argv[2:])
