"""`python -m stagecoach.trainer_node RUN`: the trainer without Ray, or with `--rank 1` another rank (SSH, SLURM)."""

import signal
import sys

if not sys.flags.safe_path:  # `python -m` puts the folder where the user stands before all others
    sys.path.append(sys.path.pop(0))

from stagecoach.shared.base.errors import ConfigError, StagecoachError, UserError
from stagecoach.shared.base.printable import complain
from stagecoach.shared.runtime.launch import launch_from_arguments, refuse_unreachable, role_arguments
from stagecoach.trainer_node.process import run_rank


def main() -> int:
    """Takes over a run as its trainer; exit code 0 at the end of the run, 2 for the user's mistakes. SIGTERM and Ctrl-C
    make it leave with a checkpoint, a second one at once; the run stays open for another trainer."""
    parser = role_arguments(
        "stagecoach.trainer_node", "Takes over a run as its trainer; one that is at work is fenced off."
    )
    parser.add_argument("--rank", type=int, default=0, help="run as rank 1 … trainer.ranks − 1 instead of the trainer")
    try:
        arguments = parser.parse_args()
        launch, rank = launch_from_arguments(arguments), arguments.rank
        ranks = launch.config["trainer"]["ranks"]
        if not 0 <= rank < ranks:
            raise ConfigError(f"--rank {rank}: this run has trainer.ranks={ranks}, which are 0 to {ranks - 1}")
        refuse_unreachable(launch, "trainer")
        print(run_rank(launch, rank, (signal.SIGTERM, signal.SIGINT)))
    except StagecoachError as error:
        complain(error)
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
