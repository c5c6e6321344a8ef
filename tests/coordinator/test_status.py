"""The status of a run: who waits for whom, from Redis while it is live, from the sync files when it has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator.status import Status, bottleneck, ended_status, live_status
from shared.checkpoint import FINISHED, STATUS, CheckpointStore
from shared.errors import RunNotFound
from shared.events import record_evaluation
from shared.heartbeat import DEAD_AFTER_SECONDS, Beat, Heartbeat
from shared.object_store import FileStore
from tests.conftest import MakeRole, create_flow, minimal_config


def beat(role: str, id_: str | None = None, **changes: Any) -> Beat:
    fields: dict[str, Any] = {
        "role": role, "id": id_ or role, "stamp": "1.0", "age_seconds": 0.5, "pid": 1, "host": "here", "ended": None,
        "waiting_for": None, "waiting_seconds": 0.0, "deadline_seconds": 0.0, "progress": {"version": 3},
    }  # fmt: skip
    return Beat(**fields | changes)


WAITS: dict[str, Any] = {"waiting_for": "experience", "waiting_seconds": 2.0}
SILENT: dict[str, Any] = {"age_seconds": DEAD_AFTER_SECONDS + 7}
CASES: dict[str, tuple[list[Beat], dict[str, Any], str]] = {
    "no trainer": ([beat("worker", "worker-0")], {}, "the trainer, which is starting"),
    "trainer that starts": ([beat("trainer", progress={})], {}, "the trainer, which is starting"),
    "no room": (
        [beat("coordinator", progress={"unplaced": ["worker-3"]}), beat("trainer", **WAITS)], {},
        "Ray, which has no place yet for worker-3",
    ),
    "silent trainer": ([beat("trainer", **SILENT)], {}, "the trainer (silent for 17 s)"),
    "ended": ([beat("trainer", ended="solved")], {}, "the run has ended (solved)"),
    "slow workers": (
        [beat("trainer", **WAITS), beat("worker", "worker-0", waiting_for="credit"), beat("worker", "worker-1")], {},
        "rollout workers (worker-1), for 2.0 s",
    ),
    "silent worker": (
        [beat("trainer", **WAITS), beat("worker", "worker-0"), beat("worker", "worker-1", **SILENT)], {},
        "worker-1 (silent for 17 s)",
    ),
    "no worker": ([beat("trainer", **WAITS)], {}, "rollout workers (none is alive)"),
    "learning": (
        [beat("trainer"), beat("worker", "worker-0", waiting_for="credit")], {}, "the trainer, which is learning"
    ),
    "full log": (
        [beat("trainer", **WAITS), beat("worker", "worker-0", waiting_for="room in the log (…)")], {},
        "the store: workers wait for room in the log",
    ),
    "full memory": (
        [beat("trainer", **WAITS), beat("worker", "worker-0", waiting_for="memory in Redis (…)")], {},
        "Redis, whose memory is full (maxmemory)",
    ),
    "full log and why": (
        [beat("trainer", **WAITS), beat("worker", "worker-0", waiting_for="room in the log (…)")],
        {"error": "SlowDown"}, "which a durable checkpoint frees (SlowDown)",
    ),
    "trainer starts without a store": (
        [beat("trainer", progress={}, waiting_for="the store", waiting_seconds=4.0, trouble="it is on fire")], {},
        "the store: it is on fire (the trainer, for 4.0 s)",
    ),
    "workers start without a store": (
        [beat("trainer", **WAITS), beat("worker", "worker-0", waiting_for="the store", trouble="it is on fire")], {},
        "the store: it is on fire (worker-0, for 0.0 s)",
    ),
    "one worker starts without a store, another acts": (
        [beat("trainer", **WAITS), beat("worker", "worker-0", waiting_for="the store", trouble="x"),
         beat("worker", "worker-1")], {}, "rollout workers (worker-1), for 2.0 s",
    ),
    "missing rank": (
        [beat("trainer", progress={}, waiting_for="the other ranks", waiting_seconds=4.0, trouble="rank-1 (left)")], {},
        "rank-1 (left) (the trainer, for 4.0 s)",
    ),
    "ranks that start": (
        [beat("trainer", progress={}, waiting_for="the other ranks")], {}, "the other ranks, which are starting (the"
    ),
    "store away": (
        [beat("trainer", waiting_for="the last checkpoint to be durable"), beat("worker", "worker-0")],
        {"waiting_for": "the store", "error": "connection refused"}, "the store: connection refused",
    ),
    "last evaluation": (
        [beat("trainer", waiting_for="the last evaluation", waiting_seconds=3.0)], {},
        "the last evaluation (the trainer, for 3.0 s)",
    ),
    "all at work": ([beat("trainer"), beat("worker", "worker-0")], {}, "everyone is at work"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_party_that_all_wait_for_is_named(case: str) -> None:
    beats, store, expected = CASES[case]
    assert expected in bottleneck(beats, store)


def test_a_live_run_is_read_from_redis(make_role: MakeRole) -> None:
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
    status = live_status(role.redis, role.run_id)
    trainer.stop("stopped")
    assert (status.state, status.live, status.desired_workers) == ("running", True, 3)
    assert (status.env_steps, status.updates, status.episodes) == (640, 10, 4)
    assert status.best == "5_Step-320.ckpt"
    assert status.evaluation == newest, "the newest score, which nothing has confirmed"
    assert status.flow == {"in_flight": 0, "window": 4, "max_policy_lag": 1}
    plain = status.as_dict()
    assert [role["id"] for role in plain["roles"]] == ["trainer"]
    assert plain["roles"][0]["alive"] is True
    role.redis.close()


def test_a_run_that_redis_does_not_know_is_not_found(make_role: MakeRole) -> None:
    role = make_role()
    with pytest.raises(RunNotFound, match="nobody"):
        live_status(role.redis, "nobody")
    role.redis.close()


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(FileStore(tmp_path, "a"), "a")


ENTRIES = [
    {"name": "0_Step-0.ckpt", "version": 0, "env_steps": 0, "evaluation": {"mean_return": 20.0}},
    {"name": "4_Step-256.ckpt", "version": 4, "env_steps": 256, "evaluation": None},
]
KEPT = {"latest": "4_Step-256.ckpt", "best": "0_Step-0.ckpt", "final": None, "checkpoints": ENTRIES}


def test_an_ended_run_is_read_from_its_sync_files(store: CheckpointStore) -> None:
    counters = {"train": {"env_steps": 300, "updates": 5, "episodes": 7}}
    ledger = {"total": {"balances": True}}
    store.write_marker(STATUS, KEPT | {"final": "4_Step-256.ckpt"})
    store.write_marker(FINISHED, {"reason": "solved", "version": 5, "counters": counters, "ledger": ledger})
    status = ended_status(store)
    assert (status.state, status.reason, status.live) == ("finished", "solved", False)
    assert (status.version, status.env_steps, status.updates, status.episodes) == (5, 300, 5, 7)
    assert (status.latest, status.best, status.final) == ("4_Step-256.ckpt", "0_Step-0.ckpt", "4_Step-256.ckpt")
    assert status.ledger == ledger
    assert status.evaluation == {"mean_return": 20.0}


def test_a_run_without_an_end_was_interrupted_and_says_how_to_go_on(store: CheckpointStore) -> None:
    store.write_marker(STATUS, KEPT)
    status = ended_status(store)
    assert status.state == "interrupted"
    assert "stagecoach resume" in status.reason
    assert (status.version, status.env_steps) == (4, 256)


def test_a_status_file_that_is_damaged_is_as_one_that_is_lost(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next checkpoint makes it anew; until then `.finished` tells the rest."""
    monkeypatch.setattr("shared.checkpoint._READ_PAUSES_SECONDS", ())
    store.store.put(STATUS, b"{")
    assert ended_status(store).state == "interrupted"
    store.write_marker(FINISHED, {"reason": "solved", "version": 7, "counters": None})
    assert (ended_status(store).reason, ended_status(store).version) == ("solved", 7)


def test_a_run_that_failed_before_anything_was_learnt_has_a_status(store: CheckpointStore) -> None:
    store.write_marker(FINISHED, {"reason": "failed: no luck", "version": -1, "counters": None, "ledger": {}})
    status = ended_status(store)
    assert (status.state, status.reason, status.version, status.env_steps) == ("finished", "failed: no luck", -1, 0)


def test_a_run_of_which_nothing_is_stored_has_a_status(store: CheckpointStore) -> None:
    status = ended_status(store)
    assert isinstance(status, Status)
    assert (status.state, status.version, status.latest) == ("interrupted", -1, None)
