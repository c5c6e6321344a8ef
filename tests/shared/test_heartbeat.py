"""Heartbeats and named waits: who is there, what it waits for, and why it ended, by the Redis server's clock."""

from __future__ import annotations

import json
import os
import time
from itertools import islice
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from shared import heartbeat
from shared.errors import CheckpointDamaged, StoreError, StoreUnavailable, WaitTimeout
from shared.heartbeat import (
    DEAD_AFTER_SECONDS,
    Beat,
    Heartbeat,
    Wait,
    growing_pauses,
    insist,
    poll,
    read_heartbeats,
)
from shared.redis_keys import RunKeys


@pytest.fixture(autouse=True)
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits a second for a beat."""
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.02)


def only(client: redis.Redis, run_id: str) -> Beat:
    """The one beat of the run."""
    (beat,) = read_heartbeats(client, run_id)
    return beat


def until(client: redis.Redis, run_id: str, wanted: Any) -> Beat:
    """The first beat that is as wanted."""
    while not wanted(beat := only(client, run_id)):
        time.sleep(0.005)
    return beat


def test_a_role_is_seen_from_its_first_beat(redis_client: redis.Redis, unique_run_id: str) -> None:
    beating = Heartbeat(redis_client, unique_run_id, "worker", "worker-3")
    assert read_heartbeats(redis_client, unique_run_id) == []
    beating.progress = {"fragments": 7}
    beating.start()
    beat = only(redis_client, unique_run_id)
    beating.stop("drained")
    assert (beat.role, beat.id, beat.pid, beat.progress) == ("worker", "worker-3", os.getpid(), {"fragments": 7})
    assert beat.alive and beat.ended is None and beat.waiting_for is None and beat.host
    assert beat.address == "127.0.0.1", "as this Redis is reached"
    assert json.loads(json.dumps(beat.as_dict()))["alive"] is True


def test_a_wait_shows_up_under_its_name_with_its_seconds(redis_client: redis.Redis, unique_run_id: str) -> None:
    beating = Heartbeat(redis_client, unique_run_id, "trainer", "trainer")
    beating.start()
    with beating.waiting("experience", 60):
        first = until(redis_client, unique_run_id, lambda beat: beat.waiting_for == "experience")
        later = until(redis_client, unique_run_id, lambda beat: beat.waiting_seconds > first.waiting_seconds)
        assert (later.waiting_for, later.deadline_seconds) == ("experience", 60)
        with beating.waiting("the store", 60):
            until(redis_client, unique_run_id, lambda beat: beat.waiting_for == "the store")
        until(redis_client, unique_run_id, lambda beat: beat.waiting_for == "experience")
    free = until(redis_client, unique_run_id, lambda beat: beat.waiting_for is None)
    beating.stop("solved")
    assert (free.waiting_seconds, free.deadline_seconds) == (0, 0)
    assert beating.waited_seconds["experience"] >= later.waiting_seconds
    assert set(beating.waited_seconds) == {"experience", "the store"}


def test_waits_of_one_name_add_up_even_when_they_fail(redis_client: redis.Redis, unique_run_id: str) -> None:
    beating = Heartbeat(redis_client, unique_run_id, "trainer", "trainer")
    with beating.waiting("experience", 60):
        pass
    once = beating.waited_seconds["experience"]
    with pytest.raises(KeyError), beating.waiting("experience", 60):
        raise KeyError("from inside")
    assert beating.waited_seconds["experience"] > once > 0


def test_beats_tell_what_was_waited_for_in_all_with_the_wait_that_goes_on(
    redis_client: redis.Redis, unique_run_id: str
) -> None:
    heartbeat = Heartbeat(redis_client, unique_run_id, "worker", "worker-0")
    heartbeat.start()
    with heartbeat.waiting("credit", 60):
        time.sleep(0.05)
    over = until(redis_client, unique_run_id, lambda beat: "credit" in beat.waited and not beat.waiting_for)
    assert over.waited["credit"] >= 0.05
    with heartbeat.waiting("the store", 60), heartbeat.waiting("credit", 60):
        going_on = until(redis_client, unique_run_id, lambda beat: beat.waited["credit"] > over.waited["credit"] + 0.05)
        assert going_on.waiting_for == "credit"
    heartbeat.stop("done")
    last = only(redis_client, unique_run_id).waited
    assert set(last) == {"credit", "the store"}
    assert last["credit"] >= going_on.waited["credit"]


def test_a_beat_of_before_waits_were_added_up_is_read(redis_client: redis.Redis, unique_run_id: str) -> None:
    heartbeat = Heartbeat(redis_client, unique_run_id, "worker", "worker-0")
    heartbeat.stop("done")
    key = RunKeys(unique_run_id).heartbeats
    stamp, _, text = redis_client.hget(key, "worker:worker-0").decode().partition(" ")  # type: ignore[union-attr]
    old = {name: value for name, value in json.loads(text).items() if name != "waited"}
    redis_client.hset(key, "worker:worker-0", f"{stamp} {json.dumps(old)}")
    assert only(redis_client, unique_run_id).waited == {}


def test_a_wait_beyond_its_deadline_says_what_it_waited_for() -> None:
    wait = Wait("credit", 5)
    wait.check()
    wait.leave_out(-7)
    with pytest.raises(WaitTimeout, match="waited 7 s for credit; the deadline is 5 s"):
        wait.check()


def test_poll_ends_when_it_is_done_or_the_deadline_has_passed() -> None:
    answers = iter([False, False, True])
    poll(Wait("three looks", 60), lambda: next(answers), pause_seconds=0.001)
    assert next(answers, None) is None
    with pytest.raises(WaitTimeout, match="for what never comes"):
        poll(Wait("what never comes", 0.0), lambda: False, pause_seconds=0.001)


def test_the_last_beat_says_why_the_role_ended(redis_client: redis.Redis, unique_run_id: str) -> None:
    beating = Heartbeat(redis_client, unique_run_id, "worker", "worker-0")
    beating.start()
    beating.stop("drained")
    beat = only(redis_client, unique_run_id)
    assert beat.ended == "drained" and not beat.alive


def test_a_role_that_never_started_can_say_why_it_ended(redis_client: redis.Redis, unique_run_id: str) -> None:
    Heartbeat(redis_client, unique_run_id, "worker", "worker-0").stop("no such environment")
    assert only(redis_client, unique_run_id).ended == "no such environment"


def test_silence_is_told_from_the_servers_clock(redis_client: redis.Redis, unique_run_id: str) -> None:
    """The role's own clock may be wrong by hours."""
    beating = Heartbeat(redis_client, unique_run_id, "worker", "worker-0")
    beating.start()
    beating.stop("x")
    keys, client = RunKeys(unique_run_id), redis_client
    raw: Any = client.hget(keys.heartbeats, "worker:worker-0")
    stamp, _, text = raw.decode().partition(" ")
    answer: Any = client.time()
    assert 0 <= answer[0] + answer[1] / 1e6 - float(stamp) < DEAD_AFTER_SECONDS
    alive = json.dumps(json.loads(text) | {"ended": None})
    for age, expected in ((DEAD_AFTER_SECONDS / 2, True), (DEAD_AFTER_SECONDS + 1, False)):
        client.hset(keys.heartbeats, "worker:worker-0", f"{answer[0] - age:.6f} {alive}")
        beat = only(client, unique_run_id)
        assert beat.alive is expected and beat.age_seconds >= age


def test_this_machines_clock_does_not_matter(
    redis_client: redis.Redis, unique_run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 3600)
    beating = Heartbeat(redis_client, unique_run_id, "worker", "worker-0")
    beating.start()
    beat = only(redis_client, unique_run_id)
    beating.stop("x")
    assert beat.alive and 0 <= beat.age_seconds < DEAD_AFTER_SECONDS


def test_the_trainer_comes_first_and_workers_in_their_order(redis_client: redis.Redis, unique_run_id: str) -> None:
    for role, id_ in [
        ("worker", "worker-10"),
        ("other", "x"),
        ("worker", "worker-2"),
        ("evaluator", "e"),
        ("trainer", "t"),
    ]:
        Heartbeat(redis_client, unique_run_id, role, id_).stop("x")
    found = [beat.id for beat in read_heartbeats(redis_client, unique_run_id)]
    assert found == ["t", "e", "worker-2", "worker-10", "x"]


def test_a_beat_that_redis_refuses_at_the_start_is_an_error_and_at_the_end_is_not(unique_run_id: str) -> None:
    nobody = redis.Redis(port=1, socket_connect_timeout=1, retry=Retry(NoBackoff(), 0))
    beating = Heartbeat(nobody, unique_run_id, "worker", "worker-0")
    with pytest.raises(redis.ConnectionError):
        beating.start()
    beating.stop("Redis is gone")


def test_insisting_calls_again_while_the_store_fails_and_shows_what_it_says(
    redis_client: redis.Redis, unique_run_id: str
) -> None:
    beating = Heartbeat(redis_client, unique_run_id, "worker", "worker-0")
    beating.start()
    failures = [StoreError("500"), StoreUnavailable("no bucket")]

    def call() -> str:
        if failures:
            until(redis_client, unique_run_id, lambda beat: beat.trouble == seen[-1])
            seen.append(str(failures[0]))
            raise failures.pop(0)
        until(redis_client, unique_run_id, lambda beat: beat.trouble == "no bucket")
        return "here"

    seen: list[str | None] = [None]
    with beating.waiting("the store", 60) as wait:
        assert insist(wait, call) == "here"
        until(redis_client, unique_run_id, lambda beat: beat.trouble is None)
    beating.stop("ended")


def test_insisting_ends_at_the_deadline_with_the_last_words_and_at_once_for_what_is_no_fault_of_the_store() -> None:
    def call(error: Exception) -> None:
        raise error

    with pytest.raises(WaitTimeout, match=r"for the store; the deadline is 0\.01 s: SlowDown"):
        insist(Wait("the store", 0.01), lambda: call(StoreError("SlowDown")))
    with pytest.raises(CheckpointDamaged):
        insist(Wait("the store", 60), lambda: call(CheckpointDamaged("altered")))


def test_pauses_double_up_to_the_longest_and_chance_takes_up_to_half() -> None:
    series = [list(islice(growing_pauses(1.0, 8.0), 6)) for _ in range(50)]
    for number, whole in enumerate([1.0, 2.0, 4.0, 8.0, 8.0, 8.0]):
        drawn = [pauses[number] for pauses in series]
        assert whole / 2 <= min(drawn) < max(drawn) <= whole
