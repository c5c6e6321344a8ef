"""The raw data of one run: a JSON file for each task, mode and seed, one field to a line."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.learning.tasks import Mode, Task
from benchmarks.provenance import ROOT, in_log
from stagecoach.shared.base.local_disk import replacing

DATA = ROOT / "docs" / "learning" / "data"
FORMAT = 2
HELD = 3
"""So many evaluations in a row say when the gate was reached, as `stop_at.evaluations` has it."""


@dataclass(frozen=True)
class Result:
    """What one run has shown."""

    task: str
    mode: Mode
    seed: int
    digest: str
    """`Task.digest` when it ran."""
    reason: str
    """Why the run ended: exhausted, solved, failed: …"""
    env_steps: int
    """In all; warm-up counts, here and in the curves."""
    seconds: float
    """Wall clock from the command to its end: start of the services and evaluation are in it."""
    evaluations: list[tuple[int, float]]
    """(env steps, the task's measure), one for each checkpoint; that of the last is `episodes` long."""
    episodes: int
    """In the evaluation of the last checkpoint; 0 where a judge says what it is worth."""
    training: list[tuple[int, float]]
    """(env steps, mean return of the last hundred training episodes)."""
    config: dict[str, Any]
    """The task's settings."""
    config_hash: str
    """Of the run's config; empty for a peer's run."""
    machine: dict[str, Any]
    commit: str
    day: str
    """When it ended, as 2026-01-31."""
    versions: dict[str, str]
    format: int = FORMAT

    def reached_at(self, task: Task) -> float:
        """Env steps by which the gate was reached; infinite where the last checkpoint is not at the gate.

        That is the last of the first `HELD` evaluations in a row that were at the gate, else the last checkpoint.
        """
        if self.score < task.reach:
            return float("inf")
        there = [score >= task.reach for _, score in self.evaluations]
        turns = (turn for turn in range(HELD, len(there) + 1) if all(there[turn - HELD : turn]))
        return self.evaluations[next(turns, len(there)) - 1][0]

    @property
    def score(self) -> float:
        """Of the last checkpoint."""
        return self.evaluations[-1][1]

    @property
    def mean_score(self) -> float:
        """Over all checkpoints: how soon it learned, and how well."""
        return sum(score for _, score in self.evaluations) / len(self.evaluations)


def place(folder: Path, task: str, mode: Mode, seed: int) -> Path:
    """The file of one run."""
    return folder / task / f"{mode}-{seed}.json"


def write(result: Result, folder: Path) -> None:
    """As a whole or not at all."""
    path = place(folder, result.task, result.mode, result.seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in dataclasses.asdict(result).items()]
    with replacing(path) as file:
        file.write(("{\n" + ",\n".join(lines) + "\n}\n").encode())


def read(path: Path) -> Result | None:
    """None where there is no such file."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    if data["format"] != FORMAT:
        raise ValueError(f"{path} has format {data['format']}, expected {FORMAT}; remove it, and run it again")
    for curve in ("evaluations", "training"):
        data[curve] = [(int(at), float(value)) for at, value in data[curve]]
    return Result(**data)


def is_current(result: Result, task: Task) -> bool:
    """False where the row, a default that decides learning or the log of commits is not what it was."""
    return result.digest == task.digest(result.mode, result.seed) and in_log(result.commit)


def current(folder: Path, task: Task, mode: Mode) -> list[Result]:
    """The runs of a task that count today, by seed."""
    found = (read(path) for path in (folder / task.name).glob(f"{mode}-*.json"))
    return sorted((one for one in found if one and is_current(one, task)), key=lambda one: one.seed)
