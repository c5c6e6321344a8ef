"""`python -m trainer_node RUN`: the trainer without Ray (for a debugger, SSH, SLURM)."""

from __future__ import annotations

import signal
import sys

from shared.errors import StagecoachError, UserError
from shared.launch import launch_from_arguments, role_arguments
from trainer_node.trainer import Trainer


def main() -> int:
    """Takes over a run as its trainer; exit code 0 at the end of the run, 2 for the user's mistakes.

    SIGTERM and Ctrl-C make it leave with a checkpoint; the run stays open for another trainer.
    """
    parser = role_arguments("trainer_node", "Takes over a run as its trainer; one that is at work is fenced off.")
    try:
        launch = launch_from_arguments(parser.parse_args())
        trainer = Trainer(launch.open("trainer"), launch.run_folder)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: setattr(trainer, "leaving", True))
        print(trainer.run())
    except StagecoachError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
