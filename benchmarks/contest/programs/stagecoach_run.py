"""Stagecoach as its users run it, from Python: embedded Redis, S3 and Ray, or with `inline` all in this process.
Settings: `config`, that of the run, and `folder`, where its runs lie; with `keep` (another folder for them) it resumes
the run that is there. Like the other libraries, a resumed run first reports the env steps of its checkpoint.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from benchmarks.contest.programs.telling import WINDOW_EPISODES, Teller, given

_POLL_SECONDS = 0.05
"""A look reads a few short keys of Redis."""
_END_SECONDS = 30.0


def train(settings: dict[str, Any], tell: Teller) -> None:
    """Until it is ended from outside, or the run has ended."""
    from stagecoach.coordinator.run_access.run import Run
    from stagecoach.shared.config.loading import parse_config
    from stagecoach.shared.storage.metric_log import UNIX_TIME

    keep: Any = settings.get("keep")
    window = {"metrics": {"window_episodes": settings.get("window", WINDOW_EPISODES)}}
    folder = {"seed": settings["seed"], "runs_dir": keep["folder"] if keep else settings["folder"]}
    config = parse_config({**settings["config"], **window, **folder})
    began, resumes = time.time(), bool(keep) and any(Path(keep["folder"]).rglob("*.ckpt"))
    run = Run.start(config, "contest", inline=settings.get("inline", False), or_resume=bool(keep))
    try:
        while not run.ended:
            if resumes and (restored := _restored_env_steps(run)) is not None:
                tell(restored, 0, None)
                resumes = False
            signals = run.status(accounting=False).metrics
            is_new = (signals.get(UNIX_TIME) or 0.0) >= began  # Redis still has the rows of a killed start
            if is_new and (env_steps := signals.get("time/env_steps")) is not None:
                mean_return = signals.get("rollout/ep_rew_mean")
                tell(int(env_steps), int(signals.get("time/episodes") or 0), mean_return)
            time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        run.abandon()
        raise
    finally:
        run.wait(_END_SECONDS)
    if keep:
        _tell_weights(run, tell, Path(keep["folder"]))


def _restored_env_steps(run: Any) -> int | None:
    """Env steps of the checkpoint that this start of the run restored; None before that."""
    from stagecoach.shared.experience.checkpoint_name import checkpoint_env_steps

    texts = [event.text for event in run.events(run.first_event) if event.kind == "trainer"]
    names = [match[1] for text in texts if (match := re.search(r"\brestored (\S+\.ckpt)", text))]
    return checkpoint_env_steps(names[0]) if names else None


def _tell_weights(run: Any, tell: Teller, folder: Path) -> None:
    """Of all files with arrays in the last checkpoint: policies and optimizers."""
    from safetensors.numpy import load_file

    last = max(folder.rglob("*.ckpt"), key=lambda path: int(path.name.split("_")[0]))
    arrays = [load_file(path) for path in sorted(last.rglob("*.safetensors"))]
    tell.end(int(run.status().metrics["time/env_steps"]), [file[name] for file in arrays for name in sorted(file)])


if __name__ == "__main__":
    train(*given())
