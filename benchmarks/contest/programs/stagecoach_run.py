"""Stagecoach as its users run it, from Python: embedded Redis, S3 and Ray, or with `inline` all in this process.
Settings: `config`, that of the run, and `folder`, where its runs lie.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.contest.programs.telling import Teller, given

_POLL_SECONDS = 0.1
"""A look reads a few short keys of Redis."""
_END_SECONDS = 30.0


def train(settings: dict[str, Any], tell: Teller) -> None:
    """Until it is ended from outside, or the run has ended."""
    from stagecoach.coordinator.run_access.run import Run
    from stagecoach.shared.config.loading import parse_config

    config = parse_config({**settings["config"], "seed": settings["seed"], "runs_dir": settings["folder"]})
    run = Run.start(config, "contest", inline=settings.get("inline", False))
    try:
        while not run.ended:
            signals = run.status(accounting=False).metrics
            if (env_steps := signals.get("time/env_steps")) is not None:
                mean_return = signals.get("rollout/ep_rew_mean")
                tell(int(env_steps), int(signals.get("time/episodes") or 0), mean_return)
            time.sleep(_POLL_SECONDS)
    finally:
        run.abandon()
        run.wait(_END_SECONDS)


if __name__ == "__main__":
    train(*given())
