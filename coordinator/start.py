"""Where `stagecoach` begins: imports the command line and runs it."""

from __future__ import annotations

from shared.collector import interruptible


def main() -> None:
    """The command line (cli.py); ends the process with its exit code."""
    with interruptible():
        from coordinator.cli import main as command_line
    command_line()
