"""Score of a trial's run, from its evaluations at fixed env steps."""

from pathlib import Path

import numpy as np

from stagecoach.coordinator.catalog.run_files import CONFIG, RunStatus
from stagecoach.coordinator.run_access.run import Run
from stagecoach.coordinator.studies.study_config import ObjectiveConfig
from stagecoach.shared.base.failure import EndReason, reason_in_words
from stagecoach.shared.experience.spaces import Array
from stagecoach.shared.storage.metric_log import ENV_STEPS, EVALUATIONS
from stagecoach.trainer_node.state.snapshot import learned_sha256

_RETURN = "eval/ep_rew_mean"


class Unscored(Exception):
    """A run without a score; the message says why."""


def why_unfinished(run_id: str, runs_dir: Path, goal: int) -> str | None:
    """Returns why a run has not reached `goal` env steps, None if it has."""
    if not (runs_dir / run_id / CONFIG).is_file():
        return "it has not begun"
    run = Run.attach(run_id, runs_dir)
    if (run.config.stop_at.env_steps or 0) > goal:  # it reached this goal before it got the next one
        return None
    status = run.status(accounting=False)
    if status.state is RunStatus.FINISHED and status.reason == EndReason.EXHAUSTED and status.env_steps >= goal:
        return None
    return reason_in_words(status.reason.partition("\n")[0]) or status.state


def last_checkpoint(run_id: str, runs_dir: Path) -> str:
    """Returns a finished run's last checkpoint, with the hash of what it has learned."""
    store = Run.attach(run_id, runs_dir).checkpoint_store()
    name = store.resolve("final")
    return f"{name}@sha256:{learned_sha256(store.manifest(name))}"


def score_of(
    run_id: str, runs_dir: Path, objective: ObjectiveConfig, every: int, goal: int, after: int = 0
) -> float:  # fmt: skip
    """Returns the objective over the evaluations that were due every so many env steps, after `after` up to `goal`.

    Evaluations of checkpoints in between do not count: which of these are played depends on the clock.

    Raises:
        Unscored: an evaluation is missing, or the score of `seconds` was not reached.
    """
    run = Run.attach(run_id, runs_dir)
    found = dict[float, float]()
    for rows in run.metrics(EVALUATIONS):
        found |= {row[ENV_STEPS]: row[_RETURN] for _, row in rows.named() if _RETURN in row}
    due = dict[float, float]()
    for at in range(after + every, goal + 1, every):
        first = min((steps for steps in found if steps >= at), default=None)
        if first is None:
            raise Unscored(f"the evaluation at {at:,} env steps is missing; raise evaluation.final_wait_seconds")
        due[first] = found[first]
    steps, returns = np.array(list(due)), np.array(list(due.values()))
    if objective.measure == "seconds":
        return _seconds(run, steps, returns, objective.score or 0.0)
    if objective.measure == "mean_return":
        return float(returns[-objective.last :].mean())
    area = float(((returns[1:] + returns[:-1]) / 2 * np.diff(steps)).sum())
    return area / float(steps[-1] - steps[0]) if len(steps) > 1 else float(returns[0])


def _seconds(run: Run, steps: Array, returns: Array, wanted: float) -> float:
    """Time from the run's first event to the end of the first evaluation with the score."""
    if not (reached := steps[returns >= wanted]).size:
        raise Unscored(f"no evaluation reached a return of {wanted:g}; the best was {returns.max():g}")
    events = run.events()
    ends = (event for event in events if event.kind == "evaluation" and event.env_steps == reached[0])
    return next(ends, events[-1]).unix_seconds - events[0].unix_seconds
