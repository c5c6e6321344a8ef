"""Status of a run, from Redis while it is live, else from the store, with its current bottleneck."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any, cast

import redis
from pydantic import BaseModel, TypeAdapter, ValidationError

from stagecoach.coordinator.catalog.run_files import INTERRUPTED_REASON, RunStatus
from stagecoach.coordinator.catalog.run_metrics import last_row
from stagecoach.shared.base.errors import MetricsDamaged, ObjectMissing, UserError
from stagecoach.shared.base.failure import FailureKind, RunEnd, reason_in_words
from stagecoach.shared.base.printable import counted, foreign, left_out
from stagecoach.shared.protocol.events import read_evaluations
from stagecoach.shared.protocol.flow_control import Flow
from stagecoach.shared.protocol.heartbeat import Beat, read_heartbeats
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.ledger import read_accounting
from stagecoach.shared.protocol.metric_tail import newest_row
from stagecoach.shared.protocol.payload_shards import bytes_by_shard
from stagecoach.shared.storage.checkpoint_store import FINISHED, CheckpointStore
from stagecoach.shared.storage.metric_log import EVALUATIONS, TEST_ENV_STEPS, TEST_EPISODES, TRAIN
from stagecoach.trainer_node.checkpointing.retention import status_file

NO_BOUND = 10_000
"""Largest number of workers in a config."""


@dataclass(frozen=True)
class WorkerCapacity:
    now: int
    """Number on the existing machines."""
    grows: bool
    """True if an autoscaler may add machines."""
    each: str
    """Resources of a worker, for display."""
    cluster: str
    """Resources of the cluster and their users, for display."""

    @property
    def most(self) -> int:
        return NO_BOUND if self.grows else self.now

    def refuse(self, workers: int, fewer: str, more: str) -> None:
        """Raises `UserError` for more workers than ever fit; `fewer` is a command prefix, completed by a number."""
        if workers <= self.most:
            return
        remedy = f"{fewer}{self.most}, or {more}" if self.most else more
        raise UserError(
            f"{counted(workers, 'worker')} with {self.each} each requested, but {self.cluster} has room for "
            f"{self.most or 'none'}: {remedy}"
        )

    def __str__(self) -> str:
        """`6 workers (more, on machines that may be added)`."""
        return counted(self.now, "worker") + (" (more, on machines that may be added)" if self.grows else "")


_CAPACITY = TypeAdapter(WorkerCapacity)


def capacity_of(beats: Sequence[Beat]) -> WorkerCapacity | None:
    """Capacity last reported by the coordinator; None if it is silent or runs without Ray."""
    coordinator = next((beat for beat in beats if beat.role == "coordinator" and beat.alive), None)
    said = coordinator.progress.get("capacity") if coordinator is not None else None
    try:
        return _CAPACITY.validate_python(said) if said else None
    except ValidationError as error:
        left_out("the capacity that the coordinator reports", error.errors()[0]["msg"])
        return None


def check_order(run_id: str, workers: int | None, min_workers: int | None, max_workers: int | None) -> None:
    for name, number in (("scale to", workers), ("--min", min_workers), ("--max", max_workers)):
        if number is not None and number < 1:
            end = f"; `stagecoach stop {run_id}` ends the run" if number == workers else ""
            raise UserError(f"{name} {number}: expected at least 1 worker{end}")
        if number is not None and number > NO_BOUND:
            raise UserError(f"{name} {number}: expected at most {NO_BOUND} workers")
    if workers is not None and (min_workers, max_workers) != (None, None):
        raise UserError(
            f"a number or bounds, not both: `stagecoach scale {run_id} {workers}` for a fixed number, "
            f"`stagecoach scale {run_id} auto --min A --max B` for as many as are needed"
        )


def order_scale(
    client: redis.Redis, run_id: str, workers: int | None, min_workers: int | None, max_workers: int | None
) -> str:
    """Writes the order into the run's flow; returns it in words. Raises `UserError` for more than there is room for."""
    flow, capacity = Flow(client, run_id), capacity_of(read_heartbeats(client, run_id))
    state = flow.read()
    least = state.min_workers if min_workers is None else min_workers
    most = state.max_workers if max_workers is None else max_workers
    if workers is None and most is not None and least > most:
        raise UserError(f"--min {least} is more than --max {most}; a bound that is not given stays what it was")
    if capacity is not None:
        capacity.refuse(workers or least, f"stagecoach scale {run_id} ", "add machines")
    if workers is not None:
        flow.set_scaling("fixed", least, most, workers)
        return f"to {counted(workers, 'worker')}"
    flow.set_scaling("auto", least, most)
    bound = "as many as there is room for" if most is None else str(most)
    return f"automatically between {least} and {bound} (now {state.desired_workers})"


@dataclass(frozen=True)
class FleetSummary:
    """Total, mean and worst speed of the workers, each since it began to act."""

    workers: int
    """Number of workers that have not ended."""
    steps_per_second: float | None
    """Speed of all workers; None if none has acted."""
    mean_steps_per_second: float | None
    slowest_steps_per_second: float | None
    slowest: str
    oldest_heartbeat_seconds: float
    oldest_heartbeat: str

    def __str__(self) -> str:
        """`3 workers, 5,400 env steps/s; 1,800 on average, 1,200 at worst (worker-2); oldest heartbeat 0.9 s (…)`."""
        found = counted(self.workers, "worker")
        if self.steps_per_second is not None:
            found += f", {self.steps_per_second:,.0f} env steps/s; {self.mean_steps_per_second:,.0f} on average, "
            found += f"{self.slowest_steps_per_second:,.0f} at worst ({self.slowest})"
        return f"{found}; oldest heartbeat {self.oldest_heartbeat_seconds:.1f} s ({self.oldest_heartbeat})"


def summarize_fleet(beats: Sequence[Beat]) -> FleetSummary | None:
    """Summarizes the workers; returns None without workers."""
    workers = [beat for beat in beats if beat.role == "worker" and beat.ended is None]
    if not workers:
        return None
    speeds = {beat.id: speed for beat in workers if (speed := acting_speed(beat)) is not None}
    slowest = min(speeds, key=lambda name: speeds[name], default="")
    oldest = max(workers, key=lambda beat: beat.age_seconds)
    return FleetSummary(
        len(workers), sum(speeds.values()) if speeds else None, fmean(speeds.values()) if speeds else None,
        speeds.get(slowest), slowest, round(oldest.age_seconds, 3), oldest.id,
    )  # fmt: skip


def acting_speed(worker: Beat) -> float | None:
    """Env steps per second since the process began to act, waits included; None before that."""
    seconds = sum(spent for stage, spent in worker.stages.items() if stage != "start")
    transitions = int(worker.progress.get("transitions", 0))
    return transitions / seconds if transitions and seconds > 0 else None


@dataclass(frozen=True)
class Status:
    """Status of a run, as `stagecoach status` shows it; `--json` prints `as_dict`."""

    run_id: str
    state: RunStatus = RunStatus.INTERRUPTED
    reason: str = ""
    live: bool = False
    """A coordinator supervises the run; its figures are those of the store while its Redis does not answer."""
    version: int = -1
    env_steps: int = 0
    updates: int = 0
    episodes: int = 0
    test_env_steps: int = 0
    """Env steps in all recorded evaluations, like `test_episodes`."""
    test_episodes: int = 0
    evaluates: bool = True
    """True if the run evaluates its policies (`evaluation.episodes`)."""
    desired_workers: int | None = None
    bottleneck: str = "nothing: the run is not live"
    scaling: dict[str, Any] = field(default_factory=dict)
    """mode (fixed, auto), min, max, and capacity: a `WorkerCapacity`, or None if unknown."""
    roles: list[Beat] = field(default_factory=list)
    fleet: FleetSummary | None = None
    ledger: dict[str, Any] = field(default_factory=dict)
    log: dict[str, int] = field(default_factory=dict)
    shards: dict[str, int] = field(default_factory=dict)
    """Shard, or `shared-memory` → bytes of the bodies there that the log names."""
    flow: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, float | None] = field(default_factory=dict)
    store: dict[str, Any] = field(default_factory=dict)
    latest: str | None = None
    best: str | None = None
    final: str | None = None
    evaluation: dict[str, Any] | None = None
    """Scores of the newest evaluation, with its `checkpoint`."""
    best_evaluation: dict[str, Any] | None = None
    """Scores of the second evaluation, which confirmed `best`."""
    failure: FailureKind | None = None

    @property
    def end(self) -> RunEnd:
        return RunEnd(self.reason, self.failure)

    def __repr__(self) -> str:
        reason = f": {reason_in_words(self.reason)}" if self.reason else ""
        figures = f"env steps {self.env_steps:,}, updates {self.updates:,}, episodes {self.episodes:,}"
        return f"<Status {self.run_id}: {self.state}{reason}, {figures}, best {self.best or '–'}; as_dict() is all>"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "roles": [beat.as_dict() for beat in self.roles]}

    def paused(self, waits: str | None) -> "Status":
        """Marks a live run as paused if it waits for Redis."""
        if waits is None:
            return self
        reason = f"waiting for {waits}; then it continues by itself"
        return replace(self, state=RunStatus.PAUSED, reason=reason, live=True, bottleneck=waits, metrics={})


class _Undeleted(BaseModel, extra="allow"):
    checkpoints: int
    objects: int
    error: str


class _StoreStatus(BaseModel, extra="allow"):
    """Store status from the trainer, the part that is shown."""

    durable: str = ""
    best: str = ""
    waiting_for: str = ""
    error: str = ""
    since: float = 0.0
    attempts: int = 0
    undeleted: _Undeleted | None = None


_STORE = TypeAdapter(_StoreStatus)


def live_status(client: redis.Redis, run_id: str, accounting: bool = True) -> Status:
    """Reads the status from Redis; raises `RunNotFound` if Redis does not know the run."""
    keys = RunKeys(run_id)
    flow = Flow(client, run_id).read()
    beats = read_heartbeats(client, run_id)
    evaluations = read_evaluations(client, run_id)
    said = cast(bytes | None, client.get(keys.store_status))
    told = foreign(_STORE, said or b"{}", f"the store's status of run {run_id}")
    store = told.model_dump(exclude_unset=True) if told else {}
    trainer = next((beat.progress for beat in beats if beat.role == "trainer"), {})
    newest = next(({**item, "checkpoint": name} for name, item in reversed(evaluations.items())), None)
    outside = bytes_by_shard(client, run_id) if accounting and (flow.shards or flow.memory) else {}
    return Status(
        run_id=run_id, state=RunStatus(flow.state), reason=flow.reason, live=True, version=flow.version,
        env_steps=int(trainer.get("env_steps", 0)), updates=int(trainer.get("updates", 0)),
        episodes=int(trainer.get("episodes", 0)), test_env_steps=int(trainer.get("test_env_steps", 0)),
        test_episodes=int(trainer.get("test_episodes", 0)), desired_workers=flow.desired_workers,
        scaling={
            "mode": flow.scaling, "min": flow.min_workers, "max": flow.max_workers, "capacity": capacity_of(beats),
        },
        bottleneck=bottleneck(beats, store), roles=beats, fleet=summarize_fleet(beats),
        ledger={name: line.as_dict() for name, line in read_accounting(client, run_id).items()} if accounting else {},
        log={"entries": client.xlen(keys.log), "bytes": flow.log_bytes, "max_bytes": flow.max_log_bytes},
        shards=dict.fromkeys(flow.shards, 0) | outside,
        flow={"in_flight": flow.in_flight, "window": flow.window, "max_policy_lag": flow.max_policy_lag},
        metrics=newest_row(client, run_id), store=store, latest=store.get("durable"), best=store.get("best"),
        evaluation=newest, best_evaluation=evaluations.get(store.get("best", ""), {}).get("confirmation"),
        failure=flow.failure,
    )  # fmt: skip


def is_supervised(client: redis.Redis, run_id: str) -> bool:
    """Returns whether a coordinator or trainer beats for this run, on any machine."""
    return any(beat.alive for beat in read_heartbeats(client, run_id) if beat.role in ("coordinator", "trainer"))


def ended_status(checkpoints: CheckpointStore) -> Status:
    """Reads the status from the store's sync files."""
    finished = checkpoints.marker(FINISHED) or {}
    kept = status_file(checkpoints)
    entries = kept.get("checkpoints", [])
    last = entries[-1] if entries else {}
    scored = {entry["name"]: entry["evaluation"] for entry in entries if entry.get("evaluation")}
    tested = _last_row(checkpoints, EVALUATIONS)
    interrupted = INTERRUPTED_REASON.format(f"stagecoach resume {checkpoints.run_id}")
    counts = last | ((finished.get("counters") or {}).get("train") or {})
    return Status(
        run_id=checkpoints.run_id, state=RunStatus.FINISHED if finished else RunStatus.INTERRUPTED,
        reason=finished.get("reason", interrupted), version=int((finished or last).get("version", -1)),
        env_steps=int(counts.get("env_steps", 0)), updates=int(counts.get("updates", 0)),
        episodes=int(counts.get("episodes", 0)), test_env_steps=int(tested.get(TEST_ENV_STEPS) or 0),
        test_episodes=int(tested.get(TEST_EPISODES) or 0), ledger=finished.get("ledger") or {},
        metrics=_last_row(checkpoints, TRAIN), latest=kept.get("latest"), best=kept.get("best"),
        final=kept.get("final"), failure=FailureKind(finished["failure"]) if finished.get("failure") else None,
        evaluation=next(reversed(scored.values()), None),
        best_evaluation=scored.get(kept.get("best"), {}).get("confirmation"),
    )  # fmt: skip


def _last_row(checkpoints: CheckpointStore, stream: str) -> dict[str, float | None]:
    with suppress(MetricsDamaged, ObjectMissing):  # `stagecoach metrics` says so
        return dict(last_row(checkpoints.store, stream)[1])
    return {}


def bottleneck(beats: list[Beat], store: dict[str, Any]) -> str:
    """One line that names the current bottleneck."""
    trainer = next((beat for beat in beats if beat.role == "trainer"), None)
    if trainer is not None and trainer.ended:
        return f"nothing: the run has ended ({reason_in_words(trainer.ended)})"
    unplaced = next((beat.progress.get("unplaced") for beat in beats if beat.role == "coordinator"), None)
    if unplaced:
        return f"Ray, which has not placed {', '.join(unplaced)} yet (no capacity, or a slow start)"
    if trainer is None:
        return "the trainer, which is starting"
    who = f"(the trainer, for {trainer.waiting_seconds:.1f} s)"
    if trainer.alive and trainer.waiting_for == "the other ranks":
        return f"{trainer.last_error or 'the other ranks, which are starting'} {who}"
    if trainer.alive and trainer.last_error:
        return f"{_party(trainer)}: {trainer.last_error} {who}"
    if "version" not in trainer.progress:
        return "the trainer, which is starting"
    if not trainer.alive:
        return f"the trainer (silent for {trainer.age_seconds:.0f} s)"
    if store.get("waiting_for") and "durable" in (trainer.waiting_for or ""):
        return f"{store['waiting_for']}: {store.get('error', 'it does not answer')}"
    workers = [beat for beat in beats if beat.role == "worker" and beat.ended is None]
    if trainer.waiting_for == "experience":
        return _slowest(workers, trainer.waiting_seconds, store)
    if trainer.waiting_for:
        return f"{trainer.waiting_for} {who}"
    if workers and all(beat.waiting_for for beat in workers):
        return _clients(workers) or "the trainer, which is learning"
    return "nothing: every role is working"


def _party(beat: Beat) -> str:
    return beat.waiting_for if beat.outage and beat.waiting_for in ("Redis", "a Redis shard") else "the store"


def _clients(workers: list[Beat]) -> str:
    """Names the clients, if all workers are gateways that wait for them."""
    if not workers or any(beat.waiting_for not in ("a client's message", "credit") for beat in workers):
        return ""
    if all(beat.waiting_for == "credit" for beat in workers):
        return ""
    sessions = sum(beat.progress.get("sessions", 0) for beat in workers)
    return f"clients of the gateway ({sessions} connected)"


def _slowest(workers: list[Beat], seconds: float, store: dict[str, Any]) -> str:
    """Names the party that delays experience for the trainer."""
    if any("memory in Redis" in (beat.waiting_for or "") for beat in workers):
        return "Redis, whose memory is full (maxmemory): workers wait until a durable checkpoint frees some"
    if any("room in the log" in (beat.waiting_for or "") for beat in workers):
        said = f" ({store['error']})" if store.get("error") else ""
        return f"the store: workers wait for room in the log, which a durable checkpoint frees{said}"
    silent = [f"{beat.id} (silent for {beat.age_seconds:.0f} s)" for beat in workers if not beat.alive]
    if silent:
        return ", ".join(silent)
    if not workers:
        return "rollout workers (none is alive)"
    troubled = next((beat for beat in workers if beat.last_error), None)
    if troubled is not None and all(beat.waiting_for for beat in workers):
        return f"{_party(troubled)}: {troubled.last_error} ({troubled.id}, for {troubled.waiting_seconds:.1f} s)"
    if clients := _clients(workers):
        return f"{clients}, for {seconds:.1f} s"
    acting = [beat.id for beat in workers if not beat.waiting_for]
    return f"rollout workers ({', '.join(acting[:4]) or 'about to act'}), for {seconds:.1f} s"
