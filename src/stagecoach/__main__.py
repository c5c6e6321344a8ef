"""Where `stagecoach` (or `python -m stagecoach`) begins: imports the command line and runs it."""

from stagecoach.shared.base.process import interruptible


def main() -> None:
    """The command line (cli/app.py); ends the process with its exit code."""
    with interruptible():
        from stagecoach.coordinator.cli.app import main as command_line
    command_line()


if __name__ == "__main__":
    main()
