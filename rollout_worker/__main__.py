"""`python -m stagecoach.rollout_worker RUN --index 3`: a rollout worker without Ray (for a debugger, SSH, SLURM)."""

import signal
import sys

if not sys.flags.safe_path:  # `python -m` puts the folder where the user stands before all others
    sys.path.append(sys.path.pop(0))

from stagecoach.rollout_worker.evaluator import Evaluator
from stagecoach.rollout_worker.worker import Worker
from stagecoach.shared.base.errors import StagecoachError, UserError
from stagecoach.shared.base.failure import RoleEnd
from stagecoach.shared.base.printable import complain
from stagecoach.shared.runtime.launch import (
    launch_from_arguments,
    refuse_unreachable,
    role_arguments,
    shutdown_on_signal,
)


def main() -> int:
    """Joins a run through Redis and the store only. Exit codes: 0 at the end of the run, 2 for a user's mistake, 1 to
    request a new process (its environments hang, or it exceeds its memory limit). SIGTERM and Ctrl-C end it after the
    current fragment, a second one at once."""
    parser = role_arguments(
        "stagecoach.rollout_worker", "Joins a run as a rollout worker or, with --evaluator, as its evaluator."
    )
    parser.add_argument("--index", type=int, help="number of this worker; no other worker of the run may have it")
    parser.add_argument("--evaluator", action="store_true", help="be the evaluator instead")
    arguments = parser.parse_args()
    if arguments.index is None and not arguments.evaluator:
        parser.error("--index is needed; the run's own workers have 0, 1, 2 …")
    try:
        launch = launch_from_arguments(arguments)
        refuse_unreachable(launch, "evaluator" if arguments.evaluator else "worker")
        context = launch.open("evaluator" if arguments.evaluator else f"worker-{arguments.index}")
        if arguments.evaluator and not context.config.evaluation.enabled:
            raise UserError("evaluation.episodes=0: this run evaluates nothing, so an evaluator has nothing to do")
        player = Evaluator(context) if arguments.evaluator else Worker(context, arguments.index)
        with shutdown_on_signal(player.request_shutdown, numbers=(signal.SIGTERM, signal.SIGINT)):
            ended = player.run()
        print(ended)
        return 1 if ended == RoleEnd.OUTGROWN else 0
    except StagecoachError as error:
        complain(error)
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
