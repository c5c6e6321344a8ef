"""Events and evaluation scores: informed readers, in order, with a bound."""

from __future__ import annotations

import json
from typing import Any

import redis

from shared import events
from shared.events import emit, read_evaluations, read_events, record_evaluation
from shared.redis_keys import RunKeys


def test_events_come_in_order_with_their_text_and_data(redis_client: redis.Redis, unique_run_id: str) -> None:
    emit(redis_client, unique_run_id, "worker", "worker-0 joined", incarnation=0)
    emit(redis_client, unique_run_id, "checkpoint", "12_Step-24576.ckpt — fertig", name="12", sizes=[1, 2], none=None)
    first, second = read_events(redis_client, unique_run_id)
    assert (first.kind, first.text, first.data) == ("worker", "worker-0 joined", {"incarnation": 0})
    assert (second.kind, second.text) == ("checkpoint", "12_Step-24576.ckpt — fertig")
    assert second.data == {"name": "12", "sizes": [1, 2], "none": None}


def test_a_reader_goes_on_after_the_last_event_it_has_seen(redis_client: redis.Redis, unique_run_id: str) -> None:
    assert read_events(redis_client, unique_run_id) == []
    emit(redis_client, unique_run_id, "state", "one")
    (seen,) = read_events(redis_client, unique_run_id)
    assert read_events(redis_client, unique_run_id, after=seen.id) == []
    assert read_events(redis_client, unique_run_id, after=seen.id, block_seconds=0.01) == []
    emit(redis_client, unique_run_id, "state", "two")
    assert [event.text for event in read_events(redis_client, unique_run_id, seen.id, block_seconds=60)] == ["two"]


def test_runs_do_not_see_each_others_events(redis_client: redis.Redis, unique_run_id: str) -> None:
    emit(redis_client, unique_run_id + "-other", "state", "elsewhere")
    assert read_events(redis_client, unique_run_id) == []


def test_only_the_newest_are_kept(redis_client: redis.Redis, unique_run_id: str) -> None:
    with redis_client.pipeline() as pipeline:
        for number in range(2 * events._KEPT):
            emit(pipeline, unique_run_id, "state", str(number))
        pipeline.execute()
    kept = read_events(redis_client, unique_run_id)
    assert events._KEPT <= len(kept) < 2 * events._KEPT
    assert kept[-1].text == str(2 * events._KEPT - 1)


def test_scores_come_in_the_order_of_their_versions(redis_client: redis.Redis, unique_run_id: str) -> None:
    assert read_evaluations(redis_client, unique_run_id) == {}
    for name, version in (("10_Step-9.ckpt", 10), ("2_Step-1.ckpt", 2), ("9_Step-8.ckpt", 9)):
        record_evaluation(redis_client, unique_run_id, name, {"version": version, "mean_return": 1.5 * version})
    found = read_evaluations(redis_client, unique_run_id)
    assert list(found) == ["2_Step-1.ckpt", "9_Step-8.ckpt", "10_Step-9.ckpt"]
    assert found["9_Step-8.ckpt"] == {"version": 9, "mean_return": 13.5}
    record_evaluation(redis_client, unique_run_id, "9_Step-8.ckpt", {"version": 9, "mean_return": 20.0})
    assert read_evaluations(redis_client, unique_run_id)["9_Step-8.ckpt"]["mean_return"] == 20.0


def test_an_outside_client_reads_plain_json(redis_client: redis.Redis, unique_run_id: str) -> None:
    emit(redis_client, unique_run_id, "worker", "joined", incarnation=3)
    client: Any = redis_client
    ((_, fields),) = client.xrange(RunKeys(unique_run_id).events)
    assert fields[b"kind"] == b"worker" and json.loads(fields[b"data"]) == {"incarnation": 3}
