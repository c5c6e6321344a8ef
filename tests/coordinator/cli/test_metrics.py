"""`stagecoach metrics`, and the last metrics in `status`: every row, from any machine, wherever it was trained."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from stagecoach.coordinator.catalog.run_metrics import all_rows, last_row
from stagecoach.coordinator.cli.curves.metrics import Stream
from stagecoach.coordinator.run_access.run import Run
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.storage.metric_log import STREAMS, TRAIN, MetricStream
from stagecoach.shared.storage.object_store import FileStore
from tests.support.processes.command_line import Stagecoach, check_refused, until


@pytest.fixture
def runs(ended_run: Run) -> tuple[str, ...]:
    return "--runs-dir", str(ended_run.config.runs_dir)


def table(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_streams_match_those_of_the_store() -> None:
    assert tuple(Stream) == STREAMS


def test_metrics_prints_newest_row(ended_run: Run, runs: tuple[str, ...], stagecoach: Stagecoach) -> None:
    row = stagecoach("metrics", "a", *runs, "--json").json()
    assert row["train/updates"] == ended_run.status().updates
    printed = stagecoach("metrics", "a", *runs, "--metric", "train/updates", "--metric", "policy/version").ok()
    assert "train/updates" in printed and "policy/version" in printed and "time/fps" not in printed
    score = stagecoach("metrics", "a", *runs, "--stream", "evaluations", "--json").json()
    assert score["checkpoint"].endswith(".ckpt") and "eval/ep_rew_mean" in score
    event = stagecoach("metrics", "a", *runs, "--stream", "events", "--json").json()
    assert event["kind"] and event["text"]


def test_csv_is_what_the_trainer_wrote_beside_it(ended_run: Run, runs: tuple[str, ...], stagecoach: Stagecoach) -> None:
    beside = table((ended_run.folder.path / "metrics" / "train.csv").read_text())
    rows = table(stagecoach("metrics", "a", *runs, "--csv", "-").ok())
    assert rows == beside and len(rows) == ended_run.status().updates
    some = table(stagecoach("metrics", "a", *runs, "--csv", "-", "--metric", "train/loss").ok())
    assert [row.keys() for row in some] == [{"time/env_steps", "time/unix_seconds", "train/loss"}] * len(rows)
    stagecoach("metrics", "a", *runs, "--stream", "evaluations", "--csv", "scores.csv").ok()
    names = [row["checkpoint"] for row in table(Path("scores.csv").read_text())]
    assert len(names) == len(set(names)) == len(ended_run.checkpoints())
    events = table(stagecoach("metrics", "a", *runs, "--stream", "events", "--csv", "-").ok())
    assert "run finished: reached stop_at" in [row["text"] for row in events if row["kind"] == "state"]


def test_metrics_reads_copy_of_embedded_store(ended_run: Run, tmp_path: Path, stagecoach: Stagecoach) -> None:
    shutil.copytree(ended_run.store_location, tmp_path / "copied" / "a")
    rows = table(stagecoach("metrics", f"file://{tmp_path}/copied/a", "--csv", "-").ok())
    assert len(rows) == ended_run.status().updates
    assert "finished" in stagecoach("status", "a").ok()
    assert Run.attach("a", tmp_path / "runs").store_location == f"{tmp_path}/copied/a"


def test_json_lines_have_null_for_what_is_not_finite(tmp_path: Path, stagecoach: Stagecoach, ended_run: Run) -> None:
    shutil.copytree(ended_run.config.runs_dir / "a", tmp_path / "runs" / "a")
    store = Run.attach("a", tmp_path / "runs").checkpoint_store().store
    newer = MetricStream(store, "a", TRAIN, 9, 10**6, 10**9)
    newer.append({"time/env_steps": 1e6, "policy/version": 99.0, "time/unix_seconds": 2e9, "train/loss": np.inf})
    newer.write()
    lines = stagecoach("metrics", "a", "--jsonl", "-").ok().splitlines()
    last = json.loads(lines[-1])
    assert (last["train/loss"], last["policy/version"]) == (None, 99.0)
    assert len(lines) == ended_run.status().updates + 1


def test_tensorboard_has_the_rows_at_their_own_times(
    ended_run: Run, runs: tuple[str, ...], stagecoach: Stagecoach, tmp_path: Path
) -> None:
    assert "tensorboard --logdir board" in stagecoach("metrics", "a", *runs, "--tensorboard", "board").ok()
    board = EventAccumulator(str(tmp_path / "board" / "a"), {"scalars": 0})
    board.Reload()
    rows = [row for part in ended_run.metrics() for _, row in part.named()]
    for shown, row in zip(board.Scalars("train/loss"), rows, strict=True):
        assert (shown.step, shown.wall_time) == (row["time/env_steps"], row["time/unix_seconds"])
        assert shown.value == pytest.approx(row["train/loss"])
    assert len(board.Scalars("eval/ep_rew_mean")) == len(ended_run.checkpoints())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--metric", "rollout/ep_rew_men"], ["no 'rollout/ep_rew_men'", "rollout/ep_rew_mean"]),
        (["--metric", "eval/ep_rew_mean"], ["--stream evaluations"]),
        (["--metric", "nothing-like-it"], ["others"]),
        (["--stream", "episodes"], ["no rows in the stream episodes", "metrics.episodes: true"]),
        (["--csv", "no-such-folder/a.csv"], ["cannot write no-such-folder/a.csv"]),
        (["--tensorboard", "config.yaml"], ["cannot write to config.yaml"]),
    ],
)
def test_metrics_explains_missing_data_in_one_line(
    runs: tuple[str, ...], stagecoach: Stagecoach, arguments: list[str], words: list[str]
) -> None:
    check_refused(stagecoach("metrics", "a", *runs, *arguments), *words)


def test_status_of_ended_run_shows_last_metrics(ended_run: Run, runs: tuple[str, ...], stagecoach: Stagecoach) -> None:
    metrics = ended_run.status().metrics
    assert metrics == ended_run.last_metrics()[1] and metrics["train/updates"] == ended_run.status().updates
    speed = f"{metrics['time/fps']:,.0f} env steps/s"
    assert speed in stagecoach("status", "a", *runs).ok()
    assert speed in stagecoach("watch", "a", *runs).ok()


def test_metrics_of_live_run_include_unstored_rows(config: Callable[..., Config], stagecoach: Stagecoach) -> None:
    run = Run.start(config(stop_at={"updates": 10**6}, checkpoint={"every": "100000 updates"}), "live", inline=True)
    try:
        status = until(run, lambda status: status.updates > 5)
        rows = table(stagecoach("metrics", "live", "--csv", "-").ok())
        updates = [float(row["train/updates"]) for row in rows]
        assert updates == list(range(1, len(rows) + 1)) and len(rows) >= status.updates
        assert stagecoach("metrics", "live", "--json").json()["train/updates"] >= len(rows)
    finally:
        run.stop()
        run.wait(60)


@pytest.mark.parametrize(("resumed_at", "newest"), [(8, 8.0), (6, 6.0), (0, None)])
def test_newest_row_may_be_of_an_older_trainer(tmp_path: Path, resumed_at: int, newest: float | None) -> None:
    store = FileStore(tmp_path, "a")
    stream = MetricStream(store, "a", TRAIN, 1, 0, 0)
    for version in range(1, 9):  # which become one segment
        stream.append({"time/env_steps": 10.0 * version, "policy/version": float(version)})
        stream.write()
    MetricStream(store, "a", TRAIN, 2, resumed_at, 10 * resumed_at).write()
    assert last_row(store, TRAIN)[1].get("policy/version") == newest


def test_newest_row_is_read_without_the_others(tmp_path: Path) -> None:
    class Counting(FileStore):
        read: list[str] = []

        def get(self, key: str) -> bytes:
            self.read.append(key)
            return super().get(key)

    store = Counting(tmp_path, "a")
    assert last_row(store, TRAIN) == ("", {})
    for epoch, updates in ((1, 5), (2, 3)):
        stream = MetricStream(store, "a", TRAIN, epoch, 5 * (epoch - 1), 50 * (epoch - 1))
        for number in range(updates):
            version = float(5 * (epoch - 1) + number + 1)
            stream.append({"time/env_steps": 10 * version, "policy/version": version})
            stream.write()
    store.read.clear()
    assert last_row(store, TRAIN)[1]["policy/version"] == 8.0
    assert len(store.read) == 1
    versions = [row["policy/version"] for rows in all_rows(store, TRAIN, None, "a") for _, row in rows.named()]
    assert versions == list(range(1, 9))
