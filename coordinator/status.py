"""The status of a run: one view, from Redis while it is live, from the store when it has ended.

It names the party that everyone waits for.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import redis
from pydantic import BaseModel, TypeAdapter

from coordinator.room import room_of
from coordinator.run_list import INTERRUPTED
from shared.bodies import bytes_by_shard
from shared.checkpoint import FINISHED, CheckpointStore
from shared.events import read_evaluations
from shared.failure import FailureKind, RunEnd, reason_in_words
from shared.flow import Flow, FlowState
from shared.foreign import foreign
from shared.heartbeat import Beat, read_heartbeats
from shared.ledger import read_books
from shared.redis_keys import RunKeys
from trainer_node.retention import best_checkpoints, confirmed_returns, status_file


@dataclass(frozen=True)
class Status:
    """What `stagecoach status` shows; `as_dict` is what `--json` prints."""

    run_id: str
    state: str
    """running, stopping, finished, or interrupted (no coordinator, and no `.finished`)."""
    reason: str
    live: bool
    version: int
    env_steps: int
    updates: int
    episodes: int
    desired_workers: int | None
    bottleneck: str
    """Who waits for whom."""
    scaling: dict[str, Any] = field(default_factory=dict)
    """mode (fixed, auto), min, max, and room: how many workers the cluster holds."""
    roles: list[Beat] = field(default_factory=list)
    ledger: dict[str, Any] = field(default_factory=dict)
    log: dict[str, int] = field(default_factory=dict)
    shards: dict[str, int] = field(default_factory=dict)
    """Shard → bytes of the bodies there that the log names."""
    flow: dict[str, int] = field(default_factory=dict)
    signals: dict[str, float | None] = field(default_factory=dict)
    store: dict[str, Any] = field(default_factory=dict)
    latest: str | None = None
    best: str | None = None
    final: str | None = None
    evaluation: dict[str, Any] | None = None
    """The newest score."""
    failure: FailureKind | None = None
    """Whose failure has ended it, where it is one."""

    @property
    def end(self) -> RunEnd:
        """Why it has ended, once it has."""
        return RunEnd(self.reason, self.failure)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "roles": [beat.as_dict() for beat in self.roles]}


class _Export(BaseModel, extra="allow"):
    checkpoint: str
    error: str


class _StoreStatus(BaseModel, extra="allow"):
    """Of what the trainer tells of the store, that which is shown."""

    durable: str = ""
    waiting_for: str = ""
    error: str = ""
    since: float = 0.0
    attempts: int = 0
    export: _Export | None = None


_FIGURES, _STORE = TypeAdapter(dict[str, float | None]), TypeAdapter(_StoreStatus)


def live_status(client: redis.Redis, run_id: str, books: bool = True) -> Status:
    """From Redis; raises `RunNotFound` where it does not know the run."""
    keys = RunKeys(run_id)
    flow = Flow(client, run_id).read()
    beats = read_heartbeats(client, run_id)
    evaluations = read_evaluations(client, run_id)
    raw = cast(list[bytes | None], client.mget([keys.signals, keys.store_status]))
    signals = foreign(_FIGURES, raw[0] or b"{}", f"the figures of run {run_id}") or {}
    told = foreign(_STORE, raw[1] or b"{}", f"the store's status of run {run_id}")
    store = told.model_dump(exclude_unset=True) if told else {}
    trainer = next((beat.progress for beat in beats if beat.role == "trainer"), {})
    newest = next(({**item, "checkpoint": name} for name, item in reversed(evaluations.items())), None)
    best = next(iter(best_checkpoints(confirmed_returns(evaluations), evaluations)), None)
    return Status(
        run_id=run_id, state=flow.state, reason=flow.reason, live=True, version=flow.version,
        env_steps=int(trainer.get("env_steps", 0)), updates=int(trainer.get("updates", 0)),
        episodes=int(trainer.get("episodes", 0)), desired_workers=flow.desired_workers,
        scaling=_scaling(flow, beats),
        bottleneck=bottleneck(beats, store), roles=beats,
        ledger={worker: line.as_dict() for worker, line in read_books(client, run_id).items()} if books else {},
        log={"entries": client.xlen(keys.log), "bytes": flow.log_bytes, "max_bytes": flow.max_log_bytes},
        shards=dict.fromkeys(flow.shards, 0) | (bytes_by_shard(client, run_id) if books and flow.shards else {}),
        flow={"in_flight": flow.in_flight, "window": flow.window, "max_policy_lag": flow.max_policy_lag},
        signals=signals, store=store, latest=store.get("durable"), best=best,
        evaluation=newest, failure=flow.failure,
    )  # fmt: skip


def tended(client: redis.Redis, run_id: str) -> bool:
    """Whether a coordinator (or, without one, a trainer) beats for this run, on whatever machine."""
    return any(beat.alive for beat in read_heartbeats(client, run_id) if beat.role in ("coordinator", "trainer"))


def _scaling(flow: FlowState, beats: list[Beat]) -> dict[str, Any]:
    found = room_of(beats)
    return {
        "mode": flow.scaling,
        "min": flow.min_workers,
        "max": flow.max_workers,
        "room": found.as_dict() if found is not None else None,
    }


def ended_status(checkpoints: CheckpointStore) -> Status:
    """From the store's sync files, which need no server."""
    finished = checkpoints.marker(FINISHED)
    kept = status_file(checkpoints)
    entries = kept.get("checkpoints", [])
    last = entries[-1] if entries else {}
    train = ((finished or {}).get("counters") or {}).get("train", {})
    scores = [entry["evaluation"] for entry in entries if entry.get("evaluation")]
    return Status(
        run_id=checkpoints.run_id,
        state="finished" if finished else "interrupted",
        reason=finished["reason"] if finished else INTERRUPTED,
        live=False,
        version=int((finished or last).get("version", -1)),
        env_steps=int(train.get("env_steps", last.get("env_steps", 0))),
        updates=int(train.get("updates", last.get("updates", 0))),
        episodes=int(train.get("episodes", last.get("episodes", 0))),
        desired_workers=None,
        bottleneck="nobody: the run is not live",
        ledger=(finished or {}).get("ledger") or {},
        latest=kept.get("latest"),
        best=kept.get("best"),
        final=kept.get("final"),
        evaluation=scores[-1] if scores else None,
        failure=FailureKind(finished["failure"]) if finished and finished.get("failure") else None,
    )


def paused(known: Status, waits: str | None) -> Status:
    """Of a live run that waits for its Redis: what is known of it, and why it waits; as it is where it does not."""
    if waits is None:
        return known
    reason = f"waiting for {waits}; then it continues by itself"
    return replace(known, state="paused", reason=reason, live=True, bottleneck=waits, signals={})


def bottleneck(beats: list[Beat], store: dict[str, Any]) -> str:
    """The party that everyone waits for, in one line."""
    trainer = next((beat for beat in beats if beat.role == "trainer"), None)
    if trainer is not None and trainer.ended:
        return f"nobody: the run has ended ({reason_in_words(trainer.ended)})"
    unplaced = next((beat.progress.get("unplaced") for beat in beats if beat.role == "coordinator"), None)
    if unplaced:
        return f"Ray, which has no place yet for {', '.join(unplaced)}"
    if trainer is not None and trainer.alive and trainer.waiting_for == "the other ranks":
        who = trainer.trouble or "the other ranks, which are starting"
        return f"{who} (the trainer, for {trainer.waiting_seconds:.1f} s)"
    if trainer is not None and trainer.alive and trainer.trouble:
        return f"{_party(trainer)}: {trainer.trouble} (the trainer, for {trainer.waiting_seconds:.1f} s)"
    if trainer is None or "version" not in trainer.progress:
        return "the trainer, which is starting"
    if not trainer.alive:
        return f"the trainer (silent for {trainer.age_seconds:.0f} s)"
    if store.get("waiting_for") and "durable" in (trainer.waiting_for or ""):
        return f"{store['waiting_for']}: {store.get('error', 'it does not answer')}"
    workers = [beat for beat in beats if beat.role == "worker" and beat.ended is None]
    if trainer.waiting_for == "experience":
        return _slowest(workers, trainer.waiting_seconds, store)
    if trainer.waiting_for:
        return f"{trainer.waiting_for} (the trainer, for {trainer.waiting_seconds:.1f} s)"
    if workers and all(beat.waiting_for for beat in workers):
        return "the trainer, which is learning"
    return "nobody at this moment: everyone is at work"


def _party(beat: Beat) -> str:
    """Whose trouble it is that a role waits for."""
    return beat.waiting_for if beat.outage and beat.waiting_for in ("Redis", "a Redis shard") else "the store"


def _slowest(workers: list[Beat], seconds: float, store: dict[str, Any]) -> str:
    """Whom the trainer waits for when it waits for experience."""
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
    troubled = next((beat for beat in workers if beat.trouble), None)
    if troubled is not None and all(beat.waiting_for for beat in workers):
        return f"{_party(troubled)}: {troubled.trouble} ({troubled.id}, for {troubled.waiting_seconds:.1f} s)"
    acting = [beat.id for beat in workers if not beat.waiting_for]
    return f"rollout workers ({', '.join(acting[:4]) or 'about to act'}), for {seconds:.1f} s"
