"""Results of runs in a few numbers, differences of two, and statistics over seeds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagecoach.coordinator.catalog.run_metrics import ratings_in
from stagecoach.coordinator.run_access.run import Run
from stagecoach.shared.config.schema.section import leaves
from stagecoach.shared.experience.spaces import Array
from stagecoach.shared.protocol.events import ranking
from stagecoach.shared.storage.metric_log import ENV_STEPS, EVALUATIONS, UNIX_TIME, VERSION

_CONFIDENCE = 0.95
_NOT_OF_A_GROUP = ("seed", "runs_dir")
_POINTS = 20_001


@dataclass(frozen=True)
class RunResult:
    """Result of a run; scores are mean returns of evaluations, None if missing."""

    run_id: str
    seed: int
    state: str
    reason: str
    best: float | None
    """Score of the best checkpoint, as confirmed by a second evaluation."""
    best_checkpoint: str | None
    ranked_by: str
    """Name of the score `best`, unless it is the mean return of all agents."""
    last: float | None
    """Score of the newest evaluated policy."""
    evaluations: int
    training_return: float | None
    """Mean of the last training episodes."""
    ratings: dict[str, float]
    """Policy → newest rating."""
    env_steps: int
    updates: int
    episodes: int
    seconds: float | None
    """Time from the first to the last row of metrics, including interruptions."""
    env_steps_per_second: float | None
    """Training speed over `seconds`."""


def result_of(run: Run) -> RunResult:
    """Reads the result from the store and, of a live run, from Redis."""
    status = run.status(accounting=False)
    count, newest = 0, tuple[float, float | None]((-math.inf, None))
    for rows in run.metrics(EVALUATIONS):
        count += len(rows)
        for _, row in rows.named():
            if "eval/ep_rew_mean" in row:
                newest = max(newest, (row[VERSION], row["eval/ep_rew_mean"]))
    best = status.best_evaluation
    end = run.last_metrics()[1]
    seconds, speed = training_time(run, end)
    return RunResult(
        run_id=run.run_id, seed=run.config.seed, state=status.state, reason=status.reason,
        best=ranking(best) if best else None, best_checkpoint=status.best if best else None,
        ranked_by=best.get("ranked_by", "") if best else "", last=newest[1], evaluations=count,
        training_return=end.get("rollout/ep_rew_mean"),
        ratings=ratings_in(end),
        env_steps=status.env_steps, updates=status.updates,
        episodes=status.episodes, seconds=round(seconds, 3) if seconds else None, env_steps_per_second=speed,
    )  # fmt: skip


def training_time(run: Run, end: Mapping[str, float | None]) -> tuple[float, float | None]:
    """Returns seconds from the first row of training metrics to `end`, the newest, and env steps per second between."""
    begin = next((row for rows in run.metrics() for _, row in rows.named()), dict[str, float]())
    seconds, steps = ((end.get(name) or 0.0) - begin.get(name, 0.0) for name in (UNIX_TIME, ENV_STEPS))
    return (seconds, steps / seconds) if begin and seconds > 0 else (0.0, None)


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Fields in which two configs differ."""
    names = sorted({*one, *other})
    return {name: (one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)}


def config_fields(run: Run) -> dict[str, Any]:
    """Dotted field → value."""
    return leaves(run.config.model_dump(mode="json"))


def groups_by_seed(runs: Sequence[Run]) -> list[list[Run]]:
    """Groups runs whose configs differ only in the seed, in the order given; a repeated seed starts another group."""
    groups: list[tuple[dict[str, Any], list[Run]]] = []
    for run in runs:
        fields = {name: value for name, value in config_fields(run).items() if name not in _NOT_OF_A_GROUP}
        alike = (members for known, members in groups if known == fields)
        group = next((group for group in alike if run.config.seed not in [other.config.seed for other in group]), None)
        if group is None:
            groups.append((fields, group := []))
        group.append(run)
    return [members for _, members in groups]


def interval(values: Array) -> tuple[Array, Array]:
    """Mean over the first axis, and half the width of its 95 % interval by Student's t; NaN for a single value.

    For few seeds, the usual case, bootstrap intervals are too narrow.
    """
    count = len(values)
    mean: Array = values.mean(axis=0)
    if count < 2:
        return mean, np.full_like(mean, np.nan)
    half: Array = values.std(axis=0, ddof=1) * (_t_quantile(count - 1) / math.sqrt(count))
    return mean, half


def _t_quantile(freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t; with t = √n · tan a, the density of a is cos^(n-1)."""
    angles = np.linspace(0.0, math.pi / 2, _POINTS)
    density = np.cos(angles) ** (freedom - 1)
    mass = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(freedom) * math.tan(float(np.interp(_CONFIDENCE * mass[-1], mass, angles)))
