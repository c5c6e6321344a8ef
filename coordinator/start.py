"""Where `stagecoach` begins: imports the command line, which takes a second or two, and runs it."""

from __future__ import annotations

from shared.collector import at_rest


def main() -> None:
    """The command line (cli.py); ends the process with its exit code."""
    with at_rest():
        from coordinator.cli import main as command_line
    command_line()
