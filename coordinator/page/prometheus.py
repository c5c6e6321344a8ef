"""Prometheus metrics of live runs: state, counters and newest training metrics.

No label names a worker, and label values are bounded: roles, reasons and metrics by the code, names of waits and
stages by `totals.MOST_NAMES` a role.
"""

import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from stagecoach.coordinator.catalog.run_files import RunStatus
from stagecoach.coordinator.page.panels import PANELS, TRAINING_METRIC
from stagecoach.coordinator.page.totals import ROLES
from stagecoach.coordinator.page.view import RunView
from stagecoach.shared.base.errors import DropReason
from stagecoach.shared.storage.metric_log import TRAIN
from stagecoach.trainer_node.metrics.update_metrics import LAG_BUCKETS

_PROCESSES = (
    "Sum over all processes that the page's server has seen, including replaced processes; restarts at 0 with that "
    "server, or after a minute without a scrape."
)
_LASTS = "Survives the run's processes; stands still while a resumed trainer rereads the log."


class Described(NamedTuple):
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily] | type[HistogramMetricFamily]
    labels: tuple[str, ...]
    help: str


def _gauge(help_: str, *labels: str) -> Described:
    return Described(GaugeMetricFamily, ("run", *labels), help_)


def _counter(help_: str, *labels: str) -> Described:
    return Described(CounterMetricFamily, ("run", *labels), help_)


METRICS: dict[str, Described] = {
    "stagecoach_build_info": Described(GaugeMetricFamily, ("version",), "Always 1: the version of Stagecoach."),
    "stagecoach_run_info": _gauge(
        "Always 1: the run's state, algorithm and environment.", "state", "algorithm", "environment"
    ),
    "stagecoach_transitions_total": _counter(
        f"Transitions acted by workers (role worker) and trained on by the trainer (role trainer). {_LASTS}", "role"
    ),
    "stagecoach_dropped_transitions_total": _counter(f"Transitions dropped instead of trained on. {_LASTS}", "reason"),
    "stagecoach_ledger_unbalanced": _gauge(
        "1 if produced transitions differ from consumed + dropped + in flight, else 0."
    ),
    "stagecoach_env_steps_total": _counter(f"Environment steps that the trainer trained on. {_LASTS}"),
    "stagecoach_episodes_total": _counter(f"Training episodes that ended. {_LASTS}"),
    "stagecoach_updates_total": _counter(f"Updates of the policy. {_LASTS}"),
    "stagecoach_policy_lag_versions": Described(
        HistogramMetricFamily, ("run",), f"Policy versions between acting a fragment and learning from it. {_LASTS}"
    ),
    "stagecoach_policy_lag_bound_versions": _gauge("Bound of the lag: rollout.max_policy_lag."),
    "stagecoach_wait_seconds_total": _counter(
        f"Seconds that processes of a role waited, by reason. {_PROCESSES}", "role", "for"
    ),
    "stagecoach_stage_seconds_total": _counter(
        f"Seconds that main threads of a role spent in each stage, waits included. {_PROCESSES}", "role", "stage"
    ),
    "stagecoach_log_bytes": _gauge("Size of the experience log."),
    "stagecoach_log_max_bytes": _gauge("Bound of the log: rollout.max_log_bytes."),
    "stagecoach_fragments_in_flight": _gauge("Fragments claimed and not yet trained on."),
    "stagecoach_fragments_window": _gauge("Bound of the fragments in flight."),
    "stagecoach_workers": _gauge("Rollout workers that are alive."),
    "stagecoach_workers_wanted": _gauge("Rollout workers requested."),
    "stagecoach_worker_restarts_total": _counter(
        "Times that a new incarnation replaced a worker; a resume replaces all. Restarts with the page's server."
    ),
    "stagecoach_heartbeat_age_seconds": _gauge(
        "Age of the oldest heartbeat of a role's processes that have not ended.", "role"
    ),
    "stagecoach_store_away": _gauge("1 while the run waits for its store, else 0."),
    "stagecoach_store_undeleted": _gauge("Checkpoints and other objects that the store refuses to delete."),
    "stagecoach_redis_away": _gauge("1 while the run, or the page's server, waits for its Redis, else 0."),
    "stagecoach_gateway_sessions": _gauge("Sessions of clients that are connected to the run's gateways."),
    "stagecoach_gateway_round_trip_seconds": _gauge(
        "99th percentile of the newest 1,000 answers of a gateway; the largest of all gateways."
    ),
    TRAINING_METRIC: _gauge(
        "Newest training metrics that the page draws, also of each policy, agent or lesson.", "name", "of"
    ),
    "stagecoach_evaluation_return": _gauge("Mean return of the newest evaluation."),
}

_DRAWN = [line for panel in PANELS for line in panel.lines if (line.stream or panel.stream) == TRAIN]
TRAINING_METRICS = {name for line in _DRAWN for name in (line.metric.removesuffix("/*"), *(line.band or ()))}


def _drawn(metrics: Mapping[str, float]) -> Iterator[tuple[str, str, float]]:
    """Yields name, owner and value: `train/entropy/wolf` is `train/entropy` of wolf."""
    for metric, number in metrics.items():
        name, _, of = (metric, "", "") if metric in TRAINING_METRICS else metric.rpartition("/")
        if name in TRAINING_METRICS:
            yield name, of, number


Sample = tuple[str, tuple[str, ...], float]


def exposition(views: Sequence[RunView]) -> bytes:
    """Renders the views' last state in the text format, version 0.0.4."""
    return generate_latest(_Runs(views))


class _Runs(Collector):
    def __init__(self, views: Sequence[RunView]) -> None:
        self._views = views

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Any] = {
            name: described.kind(name, described.help, labels=described.labels) for name, described in METRICS.items()
        }
        families["stagecoach_build_info"].add_metric((importlib.metadata.version("stagecoach-rl"),), 1)
        for view in self._views:
            run_id = view.run.run_id
            for name, labels, value in _samples(view):
                families[name].add_metric((run_id, *labels), value)
            if lags := _histogram(view):
                families["stagecoach_policy_lag_versions"].add_metric((run_id,), *lags)
        yield from families.values()


def _samples(view: RunView) -> Iterator[Sample]:
    """Yields name, labels after `run`, and value; skips unknown values."""
    state, config = view.state, view.run.config
    policies = (config.policies[policy_id] for policy_id in config.trainable)
    algorithms = ", ".join(sorted({(its.algorithm or config.algorithm).name for its in policies}))
    named = (state.get("state", RunStatus.UNKNOWN), algorithms, config.environment.id)
    yield "stagecoach_run_info", named, 1
    yield from _counters(view)
    metrics = state.get("metrics", {})
    evaluation = state.get("evaluation") or {}
    log, flow = state.get("log", {}), state.get("flow", {})
    gauges: dict[tuple[str, ...], float | None] = {
        ("stagecoach_policy_lag_bound_versions",): flow.get("max_policy_lag"),
        ("stagecoach_log_bytes",): log.get("bytes"),
        ("stagecoach_log_max_bytes",): log.get("max_bytes"),
        ("stagecoach_fragments_in_flight",): flow.get("in_flight"),
        ("stagecoach_fragments_window",): flow.get("window"),
        ("stagecoach_workers_wanted",): state.get("desired_workers"),
        ("stagecoach_evaluation_return",): evaluation.get("mean_return"),
        **{(TRAINING_METRIC, name, of): value for name, of, value in _drawn(metrics)},
    }
    for (name, *labels), value in gauges.items():
        if value is not None:
            yield name, tuple(labels), value
    if total := state.get("ledger", {}).get("total"):
        yield "stagecoach_ledger_unbalanced", (), not total.get("balances", True)
    if state.get("live"):
        yield from _of_live_run(view)


def _counters(view: RunView) -> Iterator[Sample]:
    highest = view.totals.highest
    for name in ("env_steps", "episodes", "updates"):
        if (name,) in highest:
            yield f"stagecoach_{name}_total", (), highest[name,]
    for name, role in (("produced", "worker"), ("consumed", "trainer")):
        if (name,) in highest:
            yield "stagecoach_transitions_total", (role,), highest[name,]
    if ("produced",) in highest:
        for reason in DropReason:
            yield "stagecoach_dropped_transitions_total", (reason,), highest.get(("dropped", reason), 0)
    restarts = [value for key, value in highest.items() if key[0] == "incarnation"]
    if restarts:
        yield "stagecoach_worker_restarts_total", (), sum(restarts)
    names = {"waited": "stagecoach_wait_seconds_total", "stages": "stagecoach_stage_seconds_total"}
    for spent, seconds in view.totals.spent.items():
        yield names[spent.kind], (spent.role, spent.name), seconds


def _of_live_run(view: RunView) -> Iterator[Sample]:
    beats: list[Mapping[str, Any]] = view.state["roles"]
    there = [beat for beat in beats if beat["ended"] is None]
    outages = {beat["waiting_for"] for beat in there if beat["alive"] and beat["outage"]}
    redis = {"Redis", "a Redis shard"}
    paused = view.state["state"] == RunStatus.PAUSED
    yield "stagecoach_redis_away", (), paused or view.away == "Redis" or bool(outages & redis)
    waits = bool(view.state["store"].get("waiting_for"))
    yield "stagecoach_store_away", (), waits or view.away == "store" or bool(outages - redis)
    kept = view.state["store"].get("undeleted") or {}
    yield "stagecoach_store_undeleted", (), kept.get("checkpoints", 0) + kept.get("objects", 0)
    if paused or view.state["state"] == RunStatus.STARTING_OR_ENDING:  # nothing is known of its processes
        return
    if gateways := [beat["progress"] for beat in there if "gateway" in beat["progress"]]:
        yield "stagecoach_gateway_sessions", (), sum(told["sessions"] for told in gateways)
        yield "stagecoach_gateway_round_trip_seconds", (), max(told["round_trip_p99_ms"] for told in gateways) / 1000
    yield "stagecoach_workers", (), sum(beat["role"] == "worker" and beat["alive"] for beat in beats)
    for role in ROLES:
        if ages := [beat["age_seconds"] for beat in there if beat["role"] == role]:
            yield "stagecoach_heartbeat_age_seconds", (role,), max(max(ages), 0.0)


def _histogram(view: RunView) -> tuple[list[tuple[str, float]], float] | None:
    highest = view.totals.highest
    *counts, total, versions = (highest.get(("lags", str(index)), 0.0) for index in range(len(LAG_BUCKETS) + 2))
    if not total:
        return None
    bounds = [str(float(bound)) for bound in LAG_BUCKETS]
    return [*zip(bounds, counts, strict=True), ("+Inf", total)], versions
