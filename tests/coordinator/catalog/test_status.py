"""The status of a run: who waits for whom, from Redis while it is live, from the sync files when it has ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stagecoach.coordinator.catalog.status import bottleneck, ended_status, live_status
from stagecoach.coordinator.lifecycle.preparation import create_flow
from stagecoach.shared.protocol.events import record_evaluation
from stagecoach.shared.protocol.heartbeat import DEAD_AFTER_SECONDS, Beat, Heartbeat
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.storage.checkpoint_store import FINISHED, STATUS, CheckpointStore
from stagecoach.shared.storage.object_store import FileStore
from tests.conftest import MakeRole, minimal_config


def beat(role: str, id_: str | None = None, **changes: Any) -> Beat:
    fields: dict[str, Any] = {
        "role": role, "id": id_ or role, "stamp": "1.0", "age_seconds": 0.5, "pid": 1, "host": "here", "ended": None,
        "waiting_for": None, "waiting_seconds": 0.0, "deadline_seconds": 0.0, "progress": {"version": 3},
    }  # fmt: skip
    return Beat(**fields | changes)


def worker(index: int = 0, **changes: Any) -> Beat:
    return beat("worker", f"worker-{index}", **changes)


WAITS: dict[str, Any] = {"waiting_for": "experience", "waiting_seconds": 2.0}
SILENT: dict[str, Any] = {"age_seconds": DEAD_AFTER_SECONDS + 7}
NO_STORE: dict[str, Any] = {"waiting_for": "the store", "last_error": "it is on fire"}
STARTS, WAITING, AT_CREDIT = beat("trainer", progress={}), beat("trainer", **WAITS), worker(waiting_for="credit")
RANKS: dict[str, Any] = {"progress": {}, "waiting_for": "the other ranks"}
FULL_LOG = [WAITING, worker(waiting_for="room in the log (…)")]
CASES: dict[str, tuple[list[Beat], str]] = {
    "no trainer": ([worker()], "the trainer, which is starting"),
    "trainer that starts": ([STARTS], "the trainer, which is starting"),
    "no room": ([beat("coordinator", progress={"unplaced": ["worker-3"]}), WAITING], "has not placed worker-3 yet"),
    "silent trainer": ([beat("trainer", **SILENT)], "the trainer (silent for 17 s)"),
    "ended": ([beat("trainer", ended="solved")], "the run has ended (solved)"),
    "slow workers": ([WAITING, AT_CREDIT, worker(1)], "rollout workers (worker-1), for 2.0 s"),
    "silent worker": ([WAITING, worker(), worker(1, **SILENT)], "worker-1 (silent for 17 s)"),
    "no worker": ([WAITING], "rollout workers (none is alive)"),
    "learning": ([beat("trainer"), AT_CREDIT], "the trainer, which is learning"),
    "full log": (FULL_LOG, "the store: workers wait for room in the log"),
    "full memory": ([WAITING, worker(waiting_for="memory in Redis (…)")], "Redis, whose memory is full (maxmemory)"),
    "trainer starts without a store": (
        [beat("trainer", progress={}, waiting_seconds=4.0, **NO_STORE)],
        "the store: it is on fire (the trainer, for 4.0 s)",
    ),
    "workers start without a store": (
        [WAITING, worker(**NO_STORE)], "the store: it is on fire (worker-0, for 0.0 s)",
    ),
    "one worker starts without a store, another acts": (
        [WAITING, worker(**NO_STORE), worker(1)], "rollout workers (worker-1), for 2.0 s",
    ),
    "missing rank": (
        [beat("trainer", waiting_seconds=4.0, last_error="rank-1 (left)", **RANKS)],
        "rank-1 (left) (the trainer, for 4.0 s)",
    ),
    "ranks that start": ([beat("trainer", **RANKS)], "the other ranks, which are starting (the"),
    "last evaluation": (
        [beat("trainer", waiting_for="the last evaluation", waiting_seconds=3.0)],
        "the last evaluation (the trainer, for 3.0 s)",
    ),
    "all at work": ([beat("trainer"), worker()], "every role is working"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_bottleneck_is_named(case: str) -> None:
    beats, expected = CASES[case]
    assert expected in bottleneck(beats, {})


def test_bottleneck_includes_store_error() -> None:
    assert "which a durable checkpoint frees (SlowDown)" in bottleneck(FULL_LOG, {"error": "SlowDown"})
    last, away = "the last checkpoint to be durable", {"waiting_for": "the store", "error": "connection refused"}
    assert "the store: connection refused" in bottleneck([beat("trainer", waiting_for=last), worker()], away)


def test_live_status_reads_redis(make_role: MakeRole) -> None:
    role = make_role(minimal_config(rollout={"fragment_steps": 8, "fragments_per_update": 2, "max_policy_lag": 1}))
    create_flow(role)
    role.flow.set_desired_workers(3)
    trainer = Heartbeat(role.redis, role.run_id, "trainer", "trainer")
    trainer.progress = {"env_steps": 640, "updates": 10, "episodes": 4}
    trainer.start()
    for name, version, score in (("5_Step-320.ckpt", 5, 90.0), ("10_Step-640.ckpt", 10, 80.0)):
        scores = {"checkpoint": name, "version": version, "mean_return": score, "confirmation": {"mean_return": score}}
        record_evaluation(role.redis, role.run_id, name, scores)
    newest = {"checkpoint": "15_Step-960.ckpt", "version": 15, "mean_return": 99.0}
    record_evaluation(role.redis, role.run_id, "15_Step-960.ckpt", newest)
    told = {"durable": "10_Step-640.ckpt", "best": "5_Step-320.ckpt"}
    role.redis.set(RunKeys(role.run_id).store_status, json.dumps(told))
    status = live_status(role.redis, role.run_id)
    trainer.stop("stopped")
    assert status.fleet is None, "no worker is there"
    assert (status.state, status.live, status.desired_workers) == ("running", True, 3)
    assert (status.env_steps, status.updates, status.episodes) == (640, 10, 4)
    assert (status.latest, status.best) == ("10_Step-640.ckpt", "5_Step-320.ckpt"), "as the trainer keeps them"
    assert status.evaluation == newest, "the newest score, which nothing has confirmed"
    assert status.flow == {"in_flight": 0, "window": 4, "max_policy_lag": 1}
    plain = status.as_dict()
    assert [role["id"] for role in plain["roles"]] == ["trainer"]
    assert plain["roles"][0]["alive"] is True
    role.redis.close()


ENTRIES = [
    {"name": "0_Step-0.ckpt", "version": 0, "env_steps": 0, "evaluation": {"mean_return": 20.0}},
    {"name": "4_Step-256.ckpt", "version": 4, "env_steps": 256, "evaluation": None},
]
KEPT = {"latest": "4_Step-256.ckpt", "best": "0_Step-0.ckpt", "final": None, "checkpoints": ENTRIES}
COUNTERS, LEDGER = {"train": {"env_steps": 300, "updates": 5, "episodes": 7}}, {"total": {"balances": True}}
FAILED = {"reason": "failed: no luck", "version": -1, "counters": None, "ledger": {}}
SOLVED = {"reason": "solved", "version": 5, "counters": COUNTERS, "ledger": LEDGER}
ENDED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a whole one": (
        {STATUS: KEPT | {"final": "4_Step-256.ckpt"}, FINISHED: SOLVED},
        {"state": "finished", "reason": "solved", "live": False, "version": 5, "env_steps": 300, "updates": 5,
         "episodes": 7, "latest": "4_Step-256.ckpt", "best": "0_Step-0.ckpt", "final": "4_Step-256.ckpt",
         "ledger": LEDGER, "evaluation": {"mean_return": 20.0}},
    ),
    "without an end": ({STATUS: KEPT}, {"state": "interrupted", "version": 4, "env_steps": 256}),
    "damaged without an end": ({STATUS: None}, {"state": "interrupted"}),
    "damaged": ({STATUS: None, FINISHED: SOLVED}, {"reason": "solved", "version": 5}),
    "failed before anything was learned": (
        {FINISHED: FAILED}, {"state": "finished", "reason": "failed: no luck", "version": -1, "env_steps": 0},
    ),
    "nothing stored": ({}, {"state": "interrupted", "version": -1, "latest": None}),
}  # fmt: skip


@pytest.mark.parametrize("case", ENDED)
def test_ended_status_reads_sync_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """A status file that is damaged is as one that is lost: the next checkpoint makes it anew."""
    monkeypatch.setattr("stagecoach.shared.storage.checkpoint_store._READ_PAUSES_SECONDS", ())
    store = CheckpointStore(FileStore(tmp_path, "a"), "a")
    markers, expected = ENDED[case]
    for name, content in markers.items():
        store.store.put(name, b"{") if content is None else store.write_marker(name, content)
    status = ended_status(store)
    assert {name: getattr(status, name) for name in expected} == expected
    assert ("stagecoach resume" in status.reason) == (status.state == "interrupted")
