"""MetricWriters: rows for people and programs, which stay one consistent table across restarts and new figures."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import redis

from shared.config.sections import MetricsConfig
from shared.protocol.events import read_events
from shared.protocol.keys import RunKeys
from trainer_node import metrics as module
from trainer_node.metrics import CsvFile, MetricWriters, TensorBoardFile

Row = dict[str, float]


def row(env_steps: int, **more: float) -> Row:
    return {"time/env_steps": env_steps, "train/updates": env_steps // 64} | {
        name.replace("__", "/"): value for name, value in more.items()
    }


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "train.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def scalars_of(folder: Path, name: str) -> list[tuple[int, float]]:
    """Step and value of one figure, as TensorBoard shows it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    return [(event.step, event.value) for event in board.Scalars(name)]


Begin = Callable[..., MetricWriters]


@pytest.fixture
def begin(redis_client: redis.Redis, unique_run_id: str, tmp_path: Path) -> Begin:
    """`begin(env_steps)` → the writers of a trainer that begins there; `files` for more or fewer than the table."""

    def writers(env_steps: int = 0, folder: Path | None = tmp_path, **files: bool) -> MetricWriters:
        config = MetricsConfig(**({"tensorboard": False} | files))
        return MetricWriters(redis_client, unique_run_id, config, folder, env_steps)

    return writers


@pytest.fixture
def newest(redis_client: redis.Redis, unique_run_id: str) -> Callable[[], Any]:
    """`newest()` → the row in Redis; what is not JSON raises."""
    client: Any = redis_client
    return lambda: json.loads(client.get(RunKeys(unique_run_id).metrics), parse_constant=pytest.fail)


def test_each_row_is_in_all_files_and_the_newest_in_redis(
    begin: Begin, newest: Callable[[], Any], tmp_path: Path
) -> None:
    signals = begin(tensorboard=True)
    signals.write(row(64, rollout__ep_rew_mean=21.5), 64)
    signals.write(row(128, rollout__ep_rew_mean=30.25), 128)
    assert [float(found["rollout/ep_rew_mean"]) for found in rows_of(tmp_path)] == [21.5, 30.25]
    assert scalars_of(tmp_path, "rollout/ep_rew_mean") == [(64, 21.5), (128, 30.25)]
    assert newest() == {"time/env_steps": 128, "train/updates": 2, "rollout/ep_rew_mean": 30.25}


def test_a_figure_that_is_not_a_number_reaches_redis_as_null(begin: Begin, newest: Callable[[], Any]) -> None:
    begin().write(row(64, train__explained_variance=float("nan"), train__loss=float("inf")), 64)
    assert newest()["train/explained_variance"] is newest()["train/loss"] is None


def test_a_restart_drops_the_rows_of_the_future_that_it_undid(begin: Begin, tmp_path: Path) -> None:
    first = begin(tensorboard=True)
    for steps in (64, 128, 192, 256):
        first.write(row(steps, train__loss=1.0), steps)
    second = begin(128, tensorboard=True)
    assert [found["time/env_steps"] for found in rows_of(tmp_path)] == ["64.0", "128.0"]
    second.write(row(192, train__loss=2.0), 192)
    assert [float(found["train/loss"]) for found in rows_of(tmp_path)] == [1.0, 1.0, 2.0]
    assert scalars_of(tmp_path, "train/loss") == [(64, 1.0), (128, 1.0), (192, 2.0)]


def test_a_figure_that_appears_later_gets_its_column_and_older_rows_stay(begin: Begin, tmp_path: Path) -> None:
    signals = begin()
    signals.write(row(64, train__loss=1.0), 64)
    signals.write(row(128, train__loss=2.0, rollout__ep_rew_mean=9.0), 128)
    signals.write(row(192, train__loss=3.0), 192)
    found = rows_of(tmp_path)
    assert [item["train/loss"] for item in found] == ["1.0", "2.0", "3.0"]
    assert [item["rollout/ep_rew_mean"] for item in found] == ["", "9.0", ""]


def test_a_restart_keeps_the_columns_and_drops_a_row_that_a_crash_cut_off(begin: Begin, tmp_path: Path) -> None:
    first = begin()
    first.write(row(64, train__loss=1.0), 64)
    first.write(row(128, train__loss=2.0), 128)
    with (tmp_path / "train.csv").open("a") as file:
        file.write("192.0,3")
    second = begin(1000)
    second.write(row(192, train__loss=3.0), 192)
    assert [found["train/loss"] for found in rows_of(tmp_path)] == ["1.0", "2.0", "3.0"]
    assert [path.name for path in tmp_path.iterdir()] == ["train.csv"]


def test_without_files_only_redis_is_written(begin: Begin, newest: Callable[[], Any], tmp_path: Path) -> None:
    for number, writers in enumerate((begin(folder=None, tensorboard=True), begin(csv=False))):
        writers.write(row(number), number)
        assert newest()["time/env_steps"] == number and list(tmp_path.iterdir()) == []


def test_names_that_an_environment_makes_up_reach_all_writers_as_printable_text(begin: Begin, tmp_path: Path) -> None:
    name = "environment/" + os.fsdecode(b"caf\xe9") + '\x1b]52;c;\x07,"\n'
    signals = begin(tensorboard=True)
    signals.write({**row(64), name: 2.5, "x" * 1000: 1.0}, 64)
    shown = 'environment/caf\\udce9\\x1b]52;c;\\x07,"\\n'
    (found,) = rows_of(tmp_path)
    assert found[shown] == "2.5" and max(map(len, found)) < 150
    assert scalars_of(tmp_path, shown) == [(64, 2.5)]
    assert not signals.failures


def test_a_writer_that_fails_is_counted_and_told_once_and_nothing_is_raised(
    begin: Begin, redis_client: redis.Redis, unique_run_id: str, tmp_path: Path
) -> None:
    (tmp_path / "train.csv").mkdir()
    redis_client.rpush(RunKeys(unique_run_id).flow, "no hash")  # each script's first command is one on the flow
    signals = begin()
    signals.write(row(64), 64)
    redis_client.delete(RunKeys(unique_run_id).flow)
    signals.write(row(128), 128)
    assert signals.failures == {"train.csv": 3, "Redis": 1}
    assert read_events(redis_client, unique_run_id) == []  # Redis took none at that time

    begin().write(row(64), 64)
    (event,) = read_events(redis_client, unique_run_id)
    assert event.kind == "metrics" and event.text.startswith("train.csv cannot be written, training continues")


def test_a_disk_that_is_full_leaves_no_half_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = CsvFile(tmp_path / "train.csv")
    table.start(0)
    table.append(row(64))
    with monkeypatch.context() as patch:
        patch.setattr(module, "_line", lambda fields: b"128.0")  # the part that still went onto it
        patch.setattr(Path, "open", failing_open)
        with pytest.raises(OSError, match="No space left"):
            table.append(row(128))
    table.append(row(192))
    assert [found["time/env_steps"] for found in rows_of(tmp_path)] == ["64.0", "192.0"]


def test_tensorboard_lacks_the_rows_of_a_full_disk_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = TensorBoardFile(tmp_path / "tensorboard", 0)
    for step, full in ((64, True), (128, False), (192, True), (256, False)):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space") if full else nullcontext():
            if full:
                patch.setattr(Path, "open", failing_open)
            events.append(row(step, train__loss=0.5), step)
    assert scalars_of(tmp_path, "train/loss") == [(128, 0.5), (256, 0.5)]


def failing_open(path: Path, mode: str = "r", **options: Any) -> Any:
    """As on a disk that has room for what is written and for no more."""

    class Full(io.FileIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    return Full(path, mode.replace("b", ""))


def test_there_is_a_bound_on_names(begin: Begin, tmp_path: Path) -> None:
    signals = begin()
    signals.write(row(64) | {f"environment/{number}": 1.0 for number in range(2000)}, 64)
    signals.write(row(128, train__loss=1.0), 128)
    found = rows_of(tmp_path)
    assert [len(item) for item in found] == [1000, 1000]
    assert found[1]["time/env_steps"] == "128.0" and found[1]["environment/5"] == ""
    assert signals.failures == {"the metrics": 2}


def test_a_restart_looks_at_the_end_alone(tmp_path: Path) -> None:
    """Of a table of a terabyte, of which the middle was never written; who reads all of it is not done in a day."""
    path = tmp_path / "train.csv"
    path.write_text(
        "train/updates,time/env_steps,train/loss\n" + "".join(f"{n},{64 * n}.0,0.5\n" for n in range(1, 11))
    )
    begin = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(1 << 40)
        file.write(
            b"\r\n" + b"".join(b"%d,%d.0,0.5\r\n" % (number, 64 * number) for number in range(11, 31)) + b"31,19"
        )
    table = CsvFile(path)
    table.start(64 * 25)
    assert begin < path.stat().st_size < (1 << 40) + 1000
    with path.open("rb") as file:
        file.seek(-20, os.SEEK_END)
        assert file.read().endswith(b"25,1600.0,0.5\r\n")


@pytest.mark.parametrize(
    "text", ["", "a,b\r\n1,2\r\n", "train/updates,time/env_ste", "time/env_steps\r\n", "\x00" * 100]
)
def test_a_table_that_was_cut_off_in_its_first_line_or_is_none_of_ours_begins_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / "train.csv").write_text(text)
    table = CsvFile(tmp_path / "train.csv")
    table.start(100)
    table.append({"time/env_steps": 64.0})
    assert rows_of(tmp_path) == [{"time/env_steps": "64.0"}]
