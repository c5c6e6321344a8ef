"""The newest rows in Redis: as they were written, few of them, and whatever others write there is left out."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.metric_tail import append_row, newest_row, read_rows


def test_rows_after_an_id_are_read_as_written(redis_client: redis.Redis, unique_run_id: str) -> None:
    assert read_rows(redis_client, unique_run_id) == [] and newest_row(redis_client, unique_run_id) == {}
    for number in range(3):
        append_row(redis_client, unique_run_id, 2, number, {"time/env_steps": 64.0 * number, "train/loss": 0.5})
    rows = read_rows(redis_client, unique_run_id)
    assert [(item.epoch, item.number, item.row["time/env_steps"]) for item in rows] == [
        (2, 0, 0),
        (2, 1, 64),
        (2, 2, 128),
    ]
    assert [item.number for item in read_rows(redis_client, unique_run_id, rows[0].id)] == [1, 2]
    assert read_rows(redis_client, unique_run_id, rows[-1].id) == []
    assert newest_row(redis_client, unique_run_id) == {"time/env_steps": 128.0, "train/loss": 0.5}


def test_infinite_values_become_none(redis_client: redis.Redis, unique_run_id: str) -> None:
    append_row(redis_client, unique_run_id, 1, 0, {"a": float("nan"), "b": float("inf"), "c": 1.0})
    assert newest_row(redis_client, unique_run_id) == {"a": None, "b": None, "c": 1.0}


def test_there_is_a_bound_on_rows(redis_client: redis.Redis, unique_run_id: str) -> None:
    for number in range(2500):
        append_row(redis_client, unique_run_id, 1, number, {"x": 1.0})
    rows = read_rows(redis_client, unique_run_id)
    assert [item.number for item in rows] == list(range(rows[0].number, 2500)) and 1000 <= len(rows) < 1500


@pytest.mark.parametrize(
    "fields",
    [{"row": "no JSON"}, {"row": "[]"}, {"other": "x"}, {"row": '{"epoch": 1, "number": 2}'},
     {"row": '{"epoch": "x", "number": 2, "row": {}}'}, {"row": '{"epoch": 1, "number": 2, "row": {"a": "high"}}'},
     {"row": b"\xff\xfe"}],
)  # fmt: skip
def test_malformed_rows_are_left_out(redis_client: redis.Redis, unique_run_id: str, fields: dict[Any, Any]) -> None:
    append_row(redis_client, unique_run_id, 1, 0, {"x": 1.0})
    redis_client.xadd(RunKeys(unique_run_id).metrics, fields)
    append_row(redis_client, unique_run_id, 1, 1, {"x": 2.0})
    assert [item.row for item in read_rows(redis_client, unique_run_id)] == [{"x": 1.0}, {"x": 2.0}]
    redis_client.xadd(RunKeys(unique_run_id).metrics, fields)
    assert newest_row(redis_client, unique_run_id) == {}
