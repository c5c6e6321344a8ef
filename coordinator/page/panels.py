"""Panels of a run: the charts of the page, and the queries of deploy/grafana.

A line is a metric of one of the run's streams (shared/storage/metric_log.py), or all metrics with a prefix. In the
group Learning a line also stands for the metric of each policy (`train/entropy/wolf`).
"""

from dataclasses import dataclass
from typing import Literal

from stagecoach.shared.storage.metric_log import FLEET, TRAIN

Kind = Literal[
    "lines", "multiples", "shares", "return", "fleet", "autoscaler", "timeline", "ledger", "config", "video", "league",
    "clients",
]  # fmt: skip
"""`multiples`: a small chart for each line, whose scales differ."""
Group = Literal["Learning", "Throughput", "Fleet", "Records"]


@dataclass(frozen=True)
class Line:
    metric: str
    """Name of the metric; a trailing `*` means all metrics with this prefix, a line each."""
    label: str
    band: tuple[str, str] | None = None
    """Two metrics between which the line's area is shaded."""
    query: str = ""
    """Prometheus query for the same."""
    stream: str = ""
    """Stream, if not the panel's."""


@dataclass(frozen=True)
class Panel:
    group: Group
    id: str
    title: str
    kind: Kind = "lines"
    unit: str = ""
    stream: str = TRAIN
    lines: tuple[Line, ...] = ()
    note: str = ""
    """One sentence that says what to look for."""
    absent: str = "The run has not recorded these metrics yet."
    """Reason that the panel may be empty."""
    bound: str = ""
    """Field of the run's status whose value is drawn as a horizontal line."""
    queries: tuple[tuple[str, str], ...] = ()
    """Label and query of further Prometheus series."""
    needs: str = ""
    """Metric, as in `Line`, without which the panel is hidden."""


TRAINING_METRIC = "stagecoach_training_metric"


def _rate(metric: str, by: str = "run", labels: str = "") -> str:
    return f'sum by ({by}) (rate({metric}{{run=~"$run"{labels}}}[$__rate_interval]))'


def _speed(role: str) -> str:
    return _rate("stagecoach_transitions_total", labels=f',role="{role}"')


def _shares(role: str) -> str:
    """Share of each stage in the seconds of a role's main threads."""
    metric, labels = "stagecoach_stage_seconds_total", f',role="{role}"'
    return f"{_rate(metric, 'run, stage', labels)} / on (run) group_left () ({_rate(metric, labels=labels)} > 0)"


def _gauge(metric: str) -> str:
    return f'{metric}{{run=~"$run"}}'


def training_query(name: str) -> str:
    """Query for the metric of the run and of each policy (label `of`)."""
    return f'{TRAINING_METRIC}{{run=~"$run",name="{name}"}}'


def _train(metric: str, label: str, band: tuple[str, str] | None = None) -> Line:
    return Line(metric, label, band, training_query(metric))


PANELS = (
    Panel(
        "Learning", "return", "Return", "return", "return", TRAIN,
        (_train("rollout/ep_rew_mean", "training", ("rollout/ep_rew_p10", "rollout/ep_rew_p90")),),
        "Mean of the last training episodes, 10th to 90th percentile shaded; dots are evaluations, ★ is the second "
        "evaluation of the best checkpoint.",
        "No episode has ended yet.", queries=(("evaluation", _gauge("stagecoach_evaluation_return")),),
    ),
    Panel(
        "Learning", "ratings", "Ratings", unit="rating",
        lines=(Line("league/rating/*", "rating", None, training_query("league/rating")),),
        note="OpenSkill's mu − 3 sigma of each learner's current weights; a reset restarts it.",
        needs="league/rating/*",
    ),
    Panel(
        "Learning", "length", "Episode length", unit="steps",
        lines=(_train("rollout/ep_len_mean", "length", ("rollout/ep_len_p10", "rollout/ep_len_p90")),),
        absent="No episode has ended yet.",
    ),
    Panel(
        "Learning", "success", "Success rate", unit="share",
        lines=(_train("rollout/success_rate", "success"),),
        absent="This environment does not report success (is_success in its info).",
    ),
    Panel(
        "Learning", "stability", "Stability", "multiples",
        lines=(
            _train("train/approx_kl", "KL"),
            _train("train/update_kl", "KL of the update"), _train("train/clip_fraction", "clip fraction"),
            _train("train/entropy", "entropy"), _train("train/explained_variance", "explained variance"),
            _train("train/grad_norm", "gradient norm"),
        ),
        note="A KL that jumps, or an entropy that drops to zero early, means that updates are too large.",
        absent="No update has run yet, or this algorithm reports no KL, clip fraction, entropy, explained variance or "
        "gradient norm.",
    ),
    Panel(
        "Learning", "values", "Values", "multiples",
        lines=(
            _train("train/value_mean", "value"), _train("train/q_value", "Q"), _train("train/temperature", "α"),
            _train("train/value_loss", "value loss"), _train("train/critic_loss", "critic loss"),
        ),
        note="If Q keeps growing while the return does not, Q is overestimated.",
        absent="No update has run yet, or this algorithm reports no value, Q or α.",
    ),
    Panel(
        "Throughput", "speed", "Env steps per second", unit="env steps/s", stream=FLEET,
        lines=(
            Line("fleet/fps", "acted", None, _speed("worker")),
            Line("time/fps", "trained", None, _speed("trainer"), TRAIN),
        ),
        note="If fewer steps are trained than acted, the others are in the log or were dropped.",
    ),
    Panel(
        "Throughput", "waits-trainer", "Where the trainer's time goes", "shares", "share", FLEET,
        (Line("time_share/trainer/*", "", None, _shares("trainer")),),
        "A trainer that waits for experience needs more workers.",
        "The trainer has not reported its times twice yet.",
    ),
    Panel(
        "Throughput", "waits-workers", "Where the workers' time goes", "shares", "share", FLEET,
        (Line("time_share/worker/*", "", None, _shares("worker")),),
        "If workers wait for credit, there are too many, or the trainer is too slow.",
        "No worker has reported its times twice yet.",
    ),
    Panel(
        "Throughput", "lag", "Policy lag", unit="versions",
        lines=(
            _train("policy/lag_mean", "mean"),
            _train("policy/lag_max", "maximum"),
            _train("policy/lag_acting_mean", "while acting"),
            _train("policy/lag_queue_mean", "in the log"),
        ),
        note="Age in versions of the policy that acted, when the trainer learned from its experience.",
        bound="flow.max_policy_lag",
        queries=(
            (
                "95th percentile",
                f"histogram_quantile(0.95, {_rate('stagecoach_policy_lag_versions_bucket', 'run, le')})",
            ),
            ("bound", _gauge("stagecoach_policy_lag_bound_versions")),
        ),
    ),
    Panel(
        "Throughput", "log", "Experience log", unit="bytes", stream=FLEET,
        lines=(Line("log/bytes", "bytes", None, _gauge("stagecoach_log_bytes")),),
        note="Each durable checkpoint frees the log up to its position. At the bound, workers wait.",
        bound="log.max_bytes", queries=(("bound", _gauge("stagecoach_log_max_bytes")),),
    ),
    Panel(
        "Throughput", "flight", "Fragments in flight", unit="fragments", stream=FLEET,
        lines=(
            Line("log/in_flight", "in flight", None, _gauge("stagecoach_fragments_in_flight")),
            Line("log/window", "bound", None, _gauge("stagecoach_fragments_window")),
        ),
        note="Claimed by workers and not yet learned from. At the bound, workers wait for credit.",
    ),
    Panel(
        "Fleet", "fleet", "Fleet", "fleet", "env steps/s", FLEET,
        (
            Line(
                "fleet/worker_fps_mean", "mean of workers", None,
                f'{_speed("worker")} / on (run) ({_gauge("stagecoach_workers")} > 0)',
            ),
            Line("fleet/worker_fps_min", "slowest worker"),
        ),
        "A worker far below the mean is on a slow machine. A process is dead if its heartbeat is older than 10 s.",
        "No worker has reported its steps twice yet.",
    ),
    Panel(
        "Fleet", "autoscaler", "Workers", "autoscaler", "workers", FLEET,
        (
            Line("fleet/workers_wanted", "wanted", None, _gauge("stagecoach_workers_wanted")),
            Line("fleet/workers", "alive", None, _gauge("stagecoach_workers")),
        ),
    ),
    Panel(
        "Fleet", "clients", "Clients", "clients",
        note="A turn is late if its outcome comes after its fragment, or another policy version acted it.",
        queries=(
            ("sessions", _gauge("stagecoach_gateway_sessions")),
            ("round trip, p99", _gauge("stagecoach_gateway_round_trip_seconds")),
        ),
    ),
    Panel("Records", "timeline", "Checkpoints and events", "timeline"),
    Panel(
        "Records", "ledger", "Ledger", "ledger", absent="No worker has delivered experience yet.",
        queries=(
            ("dropped/s: {{reason}}", _rate("stagecoach_dropped_transitions_total", "run, reason")),
            ("out of balance", _gauge("stagecoach_ledger_unbalanced")),
        ),
    ),
    Panel("Records", "config", "Config", "config"),
    Panel(
        "Records", "video", "Last evaluation", "video",
        absent="No video yet; `stagecoach evaluate RUN --video runs/RUN/videos` records one.",
    ),
    Panel("Records", "league", "League", "league", absent="No checkpoint has ratings yet.", needs="league/rating/*"),
    Panel(
        "Records", "curriculum", "Lessons", unit="lesson",
        lines=(Line("curriculum/lesson/*", "lesson", None, training_query("curriculum/lesson")),),
        needs="curriculum/lesson/*",
    ),
)  # fmt: skip
