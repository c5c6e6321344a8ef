"""Heartbeats, named waits, events: who is there, what it waits for, why it ended, by the Redis server's clock."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from stagecoach.shared.base import world
from stagecoach.shared.base.errors import CheckpointDamaged, StoreError, StoreUnavailable, WaitTimeout
from stagecoach.shared.protocol import heartbeat
from stagecoach.shared.protocol.events import emit, read_evaluations, read_events, record_evaluation
from stagecoach.shared.protocol.heartbeat import (
    DEAD_AFTER_SECONDS,
    Beat,
    Heartbeat,
    Wait,
    growing_pauses,
    poll,
    read_heartbeats,
    retry_until_deadline,
)
from stagecoach.shared.protocol.keys import RunKeys


@pytest.fixture(autouse=True)
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits a second for a beat."""
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.02)


Until = Callable[..., Beat]


@pytest.fixture
def until(redis_client: redis.Redis, unique_run_id: str) -> Until:
    """`until(wanted)` → the run's one beat, once it is as wanted."""

    def look(wanted: Callable[[Beat], bool] = lambda beat: True) -> Beat:
        while True:
            (beat,) = read_heartbeats(redis_client, unique_run_id)
            if wanted(beat):
                return beat
            time.sleep(0.005)

    return look


@pytest.fixture
def beating(redis_client: redis.Redis, unique_run_id: str) -> Iterator[Heartbeat]:
    """The heartbeat of worker-0, which is yet to start."""
    made = Heartbeat(redis_client, unique_run_id, "worker", "worker-0")
    yield made
    made.stop("the test is over")


def test_role_is_seen_from_first_beat_to_last(redis_client: redis.Redis, unique_run_id: str, until: Until) -> None:
    beating = Heartbeat(redis_client, unique_run_id, "worker", "worker-3")
    assert read_heartbeats(redis_client, unique_run_id) == []
    beating.progress = {"fragments": 7}
    beating.start()
    beat = until()
    assert (beat.role, beat.id, beat.pid, beat.progress) == ("worker", "worker-3", os.getpid(), {"fragments": 7})
    assert beat.alive and beat.ended is None and beat.waiting_for is None and beat.host
    assert beat.address == "127.0.0.1", "as this Redis is reached"
    assert json.loads(json.dumps(beat.as_dict()))["alive"] is True
    beating.stop("drained")
    assert until().ended == "drained" and not until().alive
    Heartbeat(redis_client, unique_run_id, "worker", "worker-3").stop("no such environment")  # it never started
    assert until().ended == "no such environment"


def test_wait_is_shown_by_name_with_seconds(beating: Heartbeat, until: Until) -> None:
    beating.start()
    with pytest.raises(KeyError), beating.waiting("experience", 60):
        raise KeyError("from inside")
    failed = beating.waited_seconds["experience"]
    with beating.waiting("experience", 60):
        first = until(lambda beat: beat.waiting_for == "experience")
        later = until(lambda beat: beat.waiting_seconds > first.waiting_seconds)
        assert (later.waiting_for, later.deadline_seconds) == ("experience", 60)
        with beating.waiting("the store", 60):
            until(lambda beat: beat.waiting_for == "the store")
        until(lambda beat: beat.waiting_for == "experience")
    free = until(lambda beat: beat.waiting_for is None)
    beating.stop("solved")
    assert (free.waiting_seconds, free.deadline_seconds) == (0, 0)
    assert beating.waited_seconds["experience"] >= failed + later.waiting_seconds > later.waiting_seconds
    assert set(beating.waited_seconds) == {"experience", "the store"}


def test_beats_sum_waits_including_the_current_one(beating: Heartbeat, until: Until) -> None:
    beating.start()
    with beating.waiting("credit", 60):
        time.sleep(0.05)
    over = until(lambda beat: "credit" in beat.waited and not beat.waiting_for)
    assert over.waited["credit"] >= 0.05
    with beating.waiting("the store", 60), beating.waiting("credit", 60):
        going_on = until(lambda beat: beat.waited["credit"] > over.waited["credit"] + 0.05)
        assert going_on.waiting_for == "credit"
    beating.stop("done")
    last = until().waited
    assert set(last) == {"credit", "the store"}
    assert last["credit"] >= going_on.waited["credit"]


def test_poll_ends_when_it_is_done_or_the_deadline_has_passed() -> None:
    wait = Wait("credit", 5)
    wait.check()
    wait.leave_out(-7)
    with pytest.raises(WaitTimeout, match="waited 7 s for credit; the deadline is 5 s"):
        wait.check()
    answers = iter([False, False, True])
    poll(Wait("three looks", 60), lambda: next(answers), pause_seconds=0.001)
    assert next(answers, None) is None
    with pytest.raises(WaitTimeout, match="for what never comes"):
        poll(Wait("what never comes", 0.0), lambda: False, pause_seconds=0.001)


def test_silence_is_told_from_the_servers_clock(
    redis_client: redis.Redis, unique_run_id: str, beating: Heartbeat, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of this machine may be wrong by hours."""
    now = time.time()
    monkeypatch.setattr(world, "unix_time", lambda: now - 3600)
    beating.start()
    assert until().alive and 0 <= until().age_seconds < DEAD_AFTER_SECONDS
    beating.stop("x")
    keys, client = RunKeys(unique_run_id), redis_client
    raw: Any = client.hget(keys.heartbeats("worker"), "worker-0")
    stamp, _, text = raw.decode().partition(" ")
    answer: Any = client.time()
    assert 0 <= answer[0] + answer[1] / 1e6 - float(stamp) < DEAD_AFTER_SECONDS
    alive = json.dumps(json.loads(text) | {"ended": None})
    for age, expected in ((DEAD_AFTER_SECONDS / 2, True), (DEAD_AFTER_SECONDS + 1, False)):
        client.hset(keys.heartbeats("worker"), "worker-0", f"{answer[0] - age:.6f} {alive}")
        beat = until()
        assert beat.alive is expected and beat.age_seconds >= age


def test_heartbeats_list_trainer_first_and_workers_in_order(redis_client: redis.Redis, unique_run_id: str) -> None:
    for name in ("worker-10", "worker-2", "evaluator", "rank-1", "trainer"):
        Heartbeat(redis_client, unique_run_id, name.partition("-")[0], name).stop("x")
    found = [beat.id for beat in read_heartbeats(redis_client, unique_run_id)]
    assert found == ["trainer", "rank-1", "evaluator", "worker-2", "worker-10"]


def test_heartbeat_of_another_role_is_left_out(redis_client: redis.Redis, unique_run_id: str) -> None:
    """A worker's user may write any id into its role's key; the coordinator knows processes by their ids."""
    for id_ in ("trainer", "evaluator", "coordinator", "worker-0"):
        Heartbeat(redis_client, unique_run_id, "worker", id_).stop("x")
    assert [(beat.role, beat.id) for beat in read_heartbeats(redis_client, unique_run_id)] == [("worker", "worker-0")]


def test_refused_beat_raises_at_start_but_not_at_end(unique_run_id: str) -> None:
    nobody = redis.Redis(port=1, socket_connect_timeout=1, retry=Retry(NoBackoff(), 0))
    beating = Heartbeat(nobody, unique_run_id, "worker", "worker-0")
    with pytest.raises(redis.ConnectionError):
        beating.start()
    beating.stop("Redis is gone")


def test_retry_continues_while_store_fails_and_shows_error(beating: Heartbeat, until: Until) -> None:
    beating.start()
    failures = [StoreError("500"), StoreUnavailable("no bucket")]

    def call() -> str:
        if failures:
            until(lambda beat: beat.last_error == seen[-1])
            seen.append(str(failures[0]))
            raise failures.pop(0)
        until(lambda beat: beat.last_error == "no bucket")
        return "here"

    seen: list[str | None] = [None]
    with beating.waiting("the store", 60) as wait:
        assert retry_until_deadline(wait, call) == "here"
        until(lambda beat: beat.last_error is None)


def test_retry_stops_at_deadline_and_on_permanent_errors() -> None:
    def call(error: Exception) -> None:
        raise error

    with pytest.raises(WaitTimeout, match=r"for the store; the deadline is 0\.01 s: SlowDown"):
        retry_until_deadline(Wait("the store", 0.01), lambda: call(StoreError("SlowDown")))
    with pytest.raises(CheckpointDamaged):
        retry_until_deadline(Wait("the store", 60), lambda: call(CheckpointDamaged("altered")))


def test_pauses_double_to_the_longest_with_jitter() -> None:
    series = [list(islice(growing_pauses(1.0, 8.0), 6)) for _ in range(50)]
    for number, whole in enumerate([1.0, 2.0, 4.0, 8.0, 8.0, 8.0]):
        drawn = [pauses[number] for pauses in series]
        assert whole / 2 <= min(drawn) < max(drawn) <= whole


def test_events_come_in_order_after_the_last_one_that_was_seen(redis_client: redis.Redis, unique_run_id: str) -> None:
    emit(redis_client, unique_run_id + "-other", "state", "elsewhere")
    assert read_events(redis_client, unique_run_id) == []
    emit(redis_client, unique_run_id, "worker", "worker-0 joined", incarnation=0)
    (first,) = read_events(redis_client, unique_run_id)
    assert (first.kind, first.text, first.data) == ("worker", "worker-0 joined", {"incarnation": 0})
    assert read_events(redis_client, unique_run_id, after=first.id) == []
    assert read_events(redis_client, unique_run_id, after=first.id, block_seconds=0.01) == []
    emit(redis_client, unique_run_id, "checkpoint", "12_Step-24576.ckpt — fertig", name="12", sizes=[1, 2], none=None)
    (second,) = read_events(redis_client, unique_run_id, first.id, block_seconds=60)
    assert read_events(redis_client, unique_run_id) == [first, second]
    assert (second.kind, second.text) == ("checkpoint", "12_Step-24576.ckpt — fertig")
    assert second.data == {"name": "12", "sizes": [1, 2], "none": None}
    client: Any = redis_client
    _, (_, fields) = client.xrange(RunKeys(unique_run_id).events)
    assert fields[b"kind"] == b"checkpoint" and json.loads(fields[b"data"]) == second.data, "plain JSON"


def test_only_the_newest_events_are_kept(redis_client: redis.Redis, unique_run_id: str) -> None:
    with redis_client.pipeline() as pipeline:
        for number in range(3000):
            emit(pipeline, unique_run_id, "state", str(number))
        pipeline.execute()
    kept = read_events(redis_client, unique_run_id)
    assert 1000 <= len(kept) < 2000
    assert [event.text for event in kept] == [str(number) for number in range(3000 - len(kept), 3000)]


def test_scores_come_in_the_order_of_their_versions(redis_client: redis.Redis, unique_run_id: str) -> None:
    assert read_evaluations(redis_client, unique_run_id) == {}
    for name, version in (("10_Step-9.ckpt", 10), ("2_Step-1.ckpt", 2), ("9_Step-8.ckpt", 9)):
        record_evaluation(redis_client, unique_run_id, name, {"version": version, "mean_return": 1.5 * version})
    found = read_evaluations(redis_client, unique_run_id)
    assert list(found) == ["2_Step-1.ckpt", "9_Step-8.ckpt", "10_Step-9.ckpt"]
    assert found["9_Step-8.ckpt"] == {"version": 9, "mean_return": 13.5}
    record_evaluation(redis_client, unique_run_id, "9_Step-8.ckpt", {"version": 9, "mean_return": 20.0})
    assert read_evaluations(redis_client, unique_run_id)["9_Step-8.ckpt"]["mean_return"] == 20.0
