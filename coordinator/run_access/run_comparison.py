"""Results of runs in a few numbers, and of configs over their seeds."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from os.path import commonprefix
from typing import Any

import numpy as np

from stagecoach.coordinator.catalog.run_metrics import ratings_in
from stagecoach.coordinator.run_access.run import Run
from stagecoach.coordinator.run_access.seed_statistics import (
    improvement_interval,
    interval,
    iqm,
    iqm_interval,
    probability_of_improvement,
)
from stagecoach.shared.config.schema.section import leaves
from stagecoach.shared.experience.spaces import Array
from stagecoach.shared.protocol.events import ranking
from stagecoach.shared.storage.metric_log import ENV_STEPS, EVALUATIONS, UNIX_TIME, VERSION

_NOT_OF_A_GROUP = ("seed", "runs_dir")


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


def differences(*configs: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Field → its value in each config, for the fields in which they differ."""
    found = {name: [its.get(name) for its in configs] for name in sorted({*chain(*configs)})}
    return {name: values for name, values in found.items() if any(value != values[0] for value in values)}


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


SCORES = {"last": "last evaluation", "best": "best", "training_return": "training return"}
"""Field of a run's result → its title; each is a score by which configs are compared."""


@dataclass(frozen=True)
class ConfigResult:
    """Scores of one config over its seeds."""

    name: str
    runs: tuple[str, ...]
    seeds: int
    """Number of runs that have the score."""
    mean: float | None = None
    mean_interval: tuple[float, float] | None = None
    """95 % interval of the mean by Student's t; None with fewer than two seeds."""
    iqm: float | None = None
    """Interquartile mean."""
    iqm_interval: tuple[float, float] | None = None
    """95 % interval of that by stratified bootstrap."""
    improvement: float | None = None
    """Probability that a seed of this config scores above one of the first; None for the first."""
    improvement_interval: tuple[float, float] | None = None


def results_by_config(groups: Sequence[Sequence[RunResult]], score: str) -> list[ConfigResult]:
    """Compares configs by a score, a name in `SCORES`; each group is a config's results, one for each seed."""
    values = [np.array([its for result in group if (its := getattr(result, score)) is not None]) for group in groups]
    firsts = [None, *[values[0]] * (len(groups) - 1)]
    return [_of_config(*each) for each in zip(groups, values, firsts, strict=True)]


def _of_config(group: Sequence[RunResult], own: Array, first: Array | None) -> ConfigResult:
    ids = tuple(result.run_id for result in group)
    found = ConfigResult(_name(ids), ids, len(own))
    if len(own):
        mean, half = map(float, interval(own))
        found = replace(found, mean=mean, iqm=float(iqm(own)))
        if len(own) > 1:
            found = replace(found, mean_interval=(mean - half, mean + half), iqm_interval=_bounds(iqm_interval(own)))
        if first is not None and len(first):
            found = replace(found, improvement=probability_of_improvement(own, first))
            if min(len(own), len(first)) > 1:
                found = replace(found, improvement_interval=_bounds(improvement_interval(own, first)))
    return found


def _bounds(found: tuple[Array, Array]) -> tuple[float, float]:
    return float(found[0]), float(found[1])


def _name(run_ids: Sequence[str]) -> str:
    """Name of a config: what its runs' names have in common."""
    common = commonprefix(run_ids) if len(run_ids) > 1 else run_ids[0]  # noqa: RUF071 - of characters, as is meant
    return re.sub(r"(-seed(-\d*)?)?[-_.]*$", "", common) or run_ids[0]


def differing_fields(groups: Sequence[Sequence[Run]]) -> dict[str, list[Any]]:
    """Dotted field → its value in each config, for the fields in which configs differ."""
    found = differences(*(config_fields(group[0]) for group in groups))
    return {name: values for name, values in found.items() if name not in _NOT_OF_A_GROUP}
