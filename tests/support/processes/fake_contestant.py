"""A program of the contest for its tests. Settings: `rate` (env steps per second of the monotonic clock, so that how
busy the machine is does not matter), `mean_return`, `lines` (how many are told before it ends; each is ten episodes
later), `code` (its exit code then), `child` (a file for the process id of a child that does not end by itself),
`holds` (a file that it keeps open), and `keep`. Without a rate a line is an env step, and at the end it tells its
weights.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.contest.programs.telling import Teller, given


def train(settings: dict[str, Any], tell: Teller) -> None:
    if "child" in settings:
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        Path(settings["child"]).write_text(str(child.pid))
    if "holds" in settings:
        os.open(settings["holds"], os.O_WRONLY | os.O_CREAT)
    keep: Any = settings.get("keep")
    kept = Path(keep["folder"]) / "kept" if keep else None
    first = int(kept.read_text()) if kept is not None and kept.is_file() else 0
    for line in range(first, settings["lines"]):
        rate = settings["rate"]
        tell(line if rate is None else int(rate * time.monotonic()), 10 * line, settings.get("mean_return"))
        if kept is not None and line % keep["every_env_steps"] == 0:
            kept.parent.mkdir(exist_ok=True)
            kept.write_text(str(line))
        time.sleep(0.06)
    if settings["rate"] is None:
        tell.end(settings["lines"], [])
    print("its last words")
    sys.exit(settings.get("code", 0))


if __name__ == "__main__":
    train(*given())
