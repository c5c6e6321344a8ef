"""The profile of a run: the timelines that its processes have left in the store, as one file and one table."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from shared.checkpoint import CheckpointStore
from shared.errors import UserError
from shared.profile import FOLDER

TRACE = "profile.json"
"""In the run's folder."""


@dataclass(frozen=True)
class RunProfile:
    """Of all processes of a run that have ended in order."""

    events: list[dict[str, Any]]
    seconds: dict[str, dict[str, float]]
    """`process / thread` → stage → seconds; several lives of one role are added up."""

    @classmethod
    def read(cls, checkpoints: CheckpointStore) -> RunProfile:
        """From the run's store; raises `UserError` where there is none, and for one that cannot be read."""
        run_id = checkpoints.run_id
        events: list[dict[str, Any]] = []
        seconds: dict[str, dict[str, float]] = {}
        for key in sorted(checkpoints.store.keys(f"{FOLDER}/"), key=lambda key: ("trainer" not in key, key)):
            try:
                found = checkpoints.read_whole(key, json.loads)
            except ValueError:
                raise UserError(f"{key} of run {run_id!r} was cut off; without it the others can be read") from None
            events += found["traceEvents"]
            for thread, stages in found["otherData"]["seconds"].items():
                line = seconds.setdefault(f"{found['otherData']['name']} / {thread}", {})
                for stage, spent in stages.items():
                    line[stage] = line.get(stage, 0.0) + spent
        if not events:
            raise UserError(
                f"run {run_id!r} has left no profile: start it with `stagecoach train --profile` (signals.profile); "
                f"each process writes its own when it ends"
            )
        return cls(events, seconds)

    def write(self, path: Path) -> None:
        """The timeline, for Perfetto or speedscope."""
        path.write_text(json.dumps({"traceEvents": self.events, "displayTimeUnit": "ms"}))

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON: seconds by thread and stage."""
        return {"seconds": self.seconds}


def stages_table(seconds: dict[str, dict[str, float]]) -> Table:
    """A row for each stage of each thread, the longest first, with its share of that thread's time."""
    table = Table("process / thread", "stage", title="where the time went", title_justify="left")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    for thread, stages in seconds.items():
        whole = sum(stages.values()) or 1.0
        name = thread
        for stage, spent in sorted(stages.items(), key=lambda item: -item[1]):
            if spent >= 0.0005:
                table.add_row(name, stage, f"{spent:,.3f}", f"{spent / whole:.1%}")
                name = ""
        table.add_section()
    return table


def in_one_line(stages: dict[str, float], most: int = 6) -> str:
    """The largest shares of a thread's time since it began to work."""
    working = {stage: spent for stage, spent in stages.items() if stage != "start"}
    whole = sum(working.values())
    if whole <= 0:
        return ""
    largest = sorted(working.items(), key=lambda item: -item[1])[:most]
    return ", ".join(f"{stage} {spent / whole:.0%}" for stage, spent in largest if spent / whole >= 0.005)
