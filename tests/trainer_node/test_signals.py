"""Signals: rows for people and programs, which stay one consistent table across restarts and new figures."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path

import pytest
import redis

from shared.config import SignalsConfig
from shared.redis_keys import RunKeys
from trainer_node.signals import Signals

Row = dict[str, float]


def row(env_steps: int, **more: float) -> Row:
    """The least that the trainer writes."""
    return {"time/env_steps": env_steps, "train/updates": env_steps // 64} | {
        name.replace("__", "/"): value for name, value in more.items()
    }


def rows_of(folder: Path) -> list[dict[str, str]]:
    """The table as a program reads it."""
    with (folder / "train.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def scalars_of(folder: Path, name: str) -> list[tuple[int, float]]:
    """Step and value of one figure, as TensorBoard shows it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    return [(event.step, event.value) for event in board.Scalars(name)]


@pytest.fixture
def table_only() -> SignalsConfig:
    return SignalsConfig(tensorboard=False)


def test_each_row_is_in_the_table_in_tensorboard_and_the_newest_in_redis(
    redis_client: redis.Redis, unique_run_id: str, tmp_path: Path
) -> None:
    signals = Signals(redis_client, unique_run_id, SignalsConfig(), tmp_path)
    signals.start(0)
    signals.write(row(64, rollout__ep_rew_mean=21.5), 64)
    signals.write(row(128, rollout__ep_rew_mean=30.25), 128)
    signals.close()
    assert [float(found["rollout/ep_rew_mean"]) for found in rows_of(tmp_path)] == [21.5, 30.25]
    assert scalars_of(tmp_path, "rollout/ep_rew_mean") == [(64, 21.5), (128, 30.25)]
    newest = redis_client.get(RunKeys(unique_run_id).signals)
    assert isinstance(newest, bytes)
    assert json.loads(newest) == {"time/env_steps": 128, "train/updates": 2, "rollout/ep_rew_mean": 30.25}


def test_a_figure_that_is_not_a_number_reaches_redis_as_null(
    redis_client: redis.Redis, unique_run_id: str, tmp_path: Path, table_only: SignalsConfig
) -> None:
    signals = Signals(redis_client, unique_run_id, table_only, tmp_path)
    signals.start(0)
    signals.write(row(64, train__explained_variance=float("nan"), train__loss=float("inf")), 64)
    newest = redis_client.get(RunKeys(unique_run_id).signals)
    assert isinstance(newest, bytes)

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    found = json.loads(newest, parse_constant=refuse)
    assert found["train/explained_variance"] is None and found["train/loss"] is None


def test_a_restart_drops_the_rows_of_the_future_that_it_undid(
    redis_client: redis.Redis, unique_run_id: str, tmp_path: Path
) -> None:
    first = Signals(redis_client, unique_run_id, SignalsConfig(), tmp_path)
    first.start(0)
    for steps in (64, 128, 192, 256):
        first.write(row(steps, train__loss=1.0), steps)
    first.close()
    began = int(time.time())
    while int(time.time()) == began:  # TensorBoard reads files in the order of the seconds in which they begin
        time.sleep(0.02)
    second = Signals(redis_client, unique_run_id, SignalsConfig(), tmp_path)
    second.start(128)
    assert [found["time/env_steps"] for found in rows_of(tmp_path)] == ["64.0", "128.0"]
    second.write(row(192, train__loss=2.0), 192)
    second.close()
    assert [float(found["train/loss"]) for found in rows_of(tmp_path)] == [1.0, 1.0, 2.0]
    assert scalars_of(tmp_path, "train/loss") == [(64, 1.0), (128, 1.0), (192, 2.0)]


def test_a_figure_that_appears_later_gets_its_column_and_older_rows_stay(
    redis_client: redis.Redis, unique_run_id: str, tmp_path: Path, table_only: SignalsConfig
) -> None:
    signals = Signals(redis_client, unique_run_id, table_only, tmp_path)
    signals.start(0)
    signals.write(row(64, train__loss=1.0), 64)
    signals.write(row(128, train__loss=2.0, rollout__ep_rew_mean=9.0), 128)
    signals.write(row(192, train__loss=3.0), 192)
    found = rows_of(tmp_path)
    assert [item["train/loss"] for item in found] == ["1.0", "2.0", "3.0"]
    assert [item["rollout/ep_rew_mean"] for item in found] == ["", "9.0", ""]


def test_a_restart_keeps_the_columns_and_drops_a_row_that_a_crash_cut_off(
    redis_client: redis.Redis, unique_run_id: str, tmp_path: Path, table_only: SignalsConfig
) -> None:
    first = Signals(redis_client, unique_run_id, table_only, tmp_path)
    first.start(0)
    first.write(row(64, train__loss=1.0), 64)
    first.write(row(128, train__loss=2.0), 128)
    with (tmp_path / "train.csv").open("a") as file:
        file.write("192.0,3")
    second = Signals(redis_client, unique_run_id, table_only, tmp_path)
    second.start(1000)
    second.write(row(192, train__loss=3.0), 192)
    assert [found["train/loss"] for found in rows_of(tmp_path)] == ["1.0", "2.0", "3.0"]
    assert [path.name for path in tmp_path.iterdir()] == ["train.csv"]


def test_without_files_only_redis_is_written(redis_client: redis.Redis, unique_run_id: str, tmp_path: Path) -> None:
    for folder, config in ((None, SignalsConfig()), (tmp_path, SignalsConfig(csv=False, tensorboard=False))):
        signals = Signals(redis_client, unique_run_id, config, folder)
        signals.start(0)
        signals.write(row(64), 64)
        signals.close()
    assert list(tmp_path.iterdir()) == []
    assert redis_client.get(RunKeys(unique_run_id).signals)
