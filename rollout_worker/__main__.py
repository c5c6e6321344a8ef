"""`python -m rollout_worker RUN --index 3`: a rollout worker without Ray (for a debugger, SSH, SLURM)."""

from __future__ import annotations

import signal
import sys

from rollout_worker.evaluator import Evaluator
from rollout_worker.worker import Worker
from shared.errors import StagecoachError, UserError
from shared.launch import launch_from_arguments, role_arguments


def main() -> int:
    """Joins a run over Redis and the store alone; exit code 0 at the end of the run, 2 for the user's mistakes."""
    parser = role_arguments("rollout_worker", "Joins a run as a rollout worker or, with --evaluator, as its evaluator.")
    parser.add_argument("--index", type=int, help="number of this worker; no other worker of the run may have it")
    parser.add_argument("--evaluator", action="store_true", help="be the evaluator instead")
    arguments = parser.parse_args()
    if arguments.index is None and not arguments.evaluator:
        parser.error("--index is needed; the run's own workers have 0, 1, 2 …")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both end it in order: the claim is given back
    try:
        launch = launch_from_arguments(arguments)
        if arguments.evaluator:
            print(Evaluator(launch.open("evaluator")).run())
        else:
            print(Worker(launch.open(f"worker-{arguments.index}"), arguments.index).run())
    except StagecoachError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
