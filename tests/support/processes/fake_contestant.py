"""A program of the contest for its tests. Settings: `rate` (env steps per second of the monotonic clock, so that how
busy the machine is does not matter), `mean_return`, `lines` (how many are told before it ends; each is ten episodes
later), `code` (its exit code then), and `child` (a file for the process id of a child that does not end by itself).
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.contest.programs.telling import Teller, given


def train(settings: dict[str, Any], tell: Teller) -> None:
    """Reports progress at the given rate."""
    if "child" in settings:
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        Path(settings["child"]).write_text(str(child.pid))
    for line in range(settings["lines"]):
        tell(int(settings["rate"] * time.monotonic()), 10 * line, settings.get("mean_return"))
        time.sleep(0.06)
    print("its last words")
    sys.exit(settings.get("code", 0))


if __name__ == "__main__":
    train(*given())
