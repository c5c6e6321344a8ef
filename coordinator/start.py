"""Where `stagecoach` begins: imports the command line, which takes a second or two, and runs it."""

from __future__ import annotations

import os
import signal
from typing import Any

from shared.collector import at_rest


def main() -> None:
    """The command line (cli.py); ends the process with its exit code."""
    before = signal.signal(signal.SIGINT, _interrupted)
    with at_rest():
        from coordinator.cli import main as command_line
    signal.signal(signal.SIGINT, before)
    command_line()


def _interrupted(*_: Any) -> None:
    """Ctrl-C while modules are imported: nothing has been started, and some would not survive an exception."""
    os.write(2, b"Interrupted.\n")
    os._exit(130)
