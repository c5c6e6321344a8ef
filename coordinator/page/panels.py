"""The panels of a run: one list, of which the page draws charts and deploy/grafana has the same as queries.

A line is a metric of one of the run's streams (shared/storage/metric_log.py), or all that begin with a prefix.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from shared.storage.metric_log import FLEET, TRAIN

Kind = Literal["lines", "shares", "return", "fleet", "autoscaler", "timeline", "ledger", "config", "video", "empty"]


@dataclass(frozen=True)
class Line:
    metric: str
    """The metric's name; with a `*` at its end all that begin so, a line each."""
    label: str
    band: tuple[str, str] | None = None
    """Two metrics between which the line's area is shaded."""
    query: str = ""
    """The same for Prometheus."""


@dataclass(frozen=True)
class Panel:
    id: str
    title: str
    kind: Kind = "lines"
    unit: str = ""
    stream: str = TRAIN
    lines: tuple[Line, ...] = ()
    note: str = ""
    """What to look for, in one sentence."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _rate(metric: str, labels: str = "") -> str:
    return f'sum by (run) (rate({metric}{{run=~"$run"{labels}}}[1m]))'


def _gauge(metric: str) -> str:
    return f'{metric}{{run=~"$run"}}'


def _training(name: str) -> str:
    return f'stagecoach_training_metric{{run=~"$run",name="{name}"}}'


def _train(metric: str, label: str, band: tuple[str, str] | None = None) -> Line:
    return Line(metric, label, band, _training(metric))


PANELS = (
    Panel(
        "return", "Return", "return", "return", TRAIN,
        (_train("rollout/ep_rew_mean", "training", ("rollout/ep_rew_p10", "rollout/ep_rew_p90")),),
        "Mean of the last training episodes, 10th to 90th percentile shaded; dots are evaluations, ★ is the best.",
    ),
    Panel(
        "length", "Episode length", unit="steps",
        lines=(_train("rollout/ep_len_mean", "length", ("rollout/ep_len_p10", "rollout/ep_len_p90")),),
    ),
    Panel("success", "Success rate", lines=(_train("rollout/success_rate", "success"),)),
    Panel(
        "speed", "Env steps per second", unit="env steps/s", stream=FLEET,
        lines=(
            Line("fleet/fps", "acted", None, _rate("stagecoach_transitions_total", ',role="worker"')),
            Line("time/fps", "trained", None, _rate("stagecoach_transitions_total", ',role="trainer"')),
        ),
    ),
    Panel(
        "waits-trainer", "Where the trainer's time goes", "shares", "share", FLEET,
        (Line("time_share/trainer/*", "", None, _rate("stagecoach_stage_seconds_total", ',role="trainer"')),),
        "The trainer that waits for experience wants more workers.",
    ),
    Panel(
        "waits-workers", "Where the workers' time goes", "shares", "share", FLEET,
        (Line("time_share/worker/*", "", None, _rate("stagecoach_stage_seconds_total", ',role="worker"')),),
        "Workers that wait for credit are too many, or the trainer is too slow.",
    ),
    Panel(
        "lag", "Policy lag", unit="versions",
        lines=(
            _train("policy/lag_mean", "mean"),
            _train("policy/lag_max", "most"),
            _train("policy/lag_acting_mean", "while acting"),
            _train("policy/lag_queue_mean", "in the log"),
        ),
        note="The bound is rollout.max_policy_lag.",
    ),
    Panel(
        "log", "Experience log", unit="bytes", stream=FLEET,
        lines=(Line("log/bytes", "bytes", None, _gauge("stagecoach_log_bytes")),),
    ),
    Panel(
        "flight", "Fragments in flight", unit="fragments", stream=FLEET,
        lines=(
            Line("log/in_flight", "in flight", None, _gauge("stagecoach_fragments_in_flight")),
            Line("log/window", "bound", None, _gauge("stagecoach_fragments_window")),
        ),
    ),
    Panel(
        "stability", "Stability",
        lines=(
            _train("train/approx_kl", "KL"),
            _train("train/update_kl", "KL of the update"), _train("train/clip_fraction", "clip fraction"),
            _train("train/entropy", "entropy"), _train("train/explained_variance", "explained variance"),
            _train("train/grad_norm", "gradient norm"),
        ),
    ),
    Panel(
        "values", "Values",
        lines=(
            _train("train/value_mean", "value"), _train("train/q_value", "Q"), _train("train/temperature", "α"),
            _train("train/value_loss", "value loss"), _train("train/critic_loss", "critic loss"),
        ),
    ),
    Panel("fleet", "Fleet", "fleet", stream=FLEET),
    Panel(
        "autoscaler", "Autoscaler", "autoscaler", "workers", FLEET,
        (
            Line("fleet/workers_wanted", "wanted", None, _gauge("stagecoach_workers_wanted")),
            Line("fleet/workers", "there", None, _gauge("stagecoach_workers")),
        ),
    ),
    Panel("timeline", "Checkpoints and events", "timeline"),
    Panel("ledger", "Ledger", "ledger"),
    Panel("config", "Config", "config"),
    Panel("video", "Last evaluation", "video"),
    Panel("league", "League", "empty", note="A run without a league."),
    Panel("curriculum", "Lessons", "empty", note="A run without lessons."),
)  # fmt: skip
