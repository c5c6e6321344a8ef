"""`python -m trainer_node RUN`: the trainer without Ray (for a debugger, SSH, SLURM)."""

from __future__ import annotations

import signal
import sys

from shared.departure import leaves_on_signal
from shared.errors import StagecoachError, UserError
from shared.launch import launch_from_arguments, role_arguments
from trainer_node.trainer import Trainer


def main() -> int:
    """Takes over a run as its trainer; exit code 0 at the end of the run, 2 for the user's mistakes.

    SIGTERM and Ctrl-C make it leave with a checkpoint, a second one at once; the run stays open for another trainer.
    """
    parser = role_arguments("trainer_node", "Takes over a run as its trainer; one that is at work is fenced off.")
    try:
        launch = launch_from_arguments(parser.parse_args())
        role = launch.open("trainer")
        trainer = Trainer(role, launch.run_folder)
        grace = role.config.trainer.grace_seconds
        with leaves_on_signal(trainer.ask_to_leave, grace, (signal.SIGTERM, signal.SIGINT)):
            print(trainer.run())
    except StagecoachError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
