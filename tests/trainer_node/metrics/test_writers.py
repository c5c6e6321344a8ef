"""Writers: files that stay one consistent table across restarts and new metrics, and trackers in their local mode."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.config.sections import MetricsConfig
from stagecoach.trainer_node.metrics import table_files, writers
from stagecoach.trainer_node.metrics.table_files import CsvFile
from stagecoach.trainer_node.metrics.tensorboard_writer import TensorBoardWriter
from stagecoach.trainer_node.metrics.writers import Callback, MetricWriter, WrittenRun, check_writers, open_writer
from tests.conftest import minimal_config

OWN = "tests.trainer_node.metrics.test_writers"
Row = dict[str, float]
Open = Callable[..., MetricWriter]


def row(env_steps: float, **more: float) -> Row:
    return {"time/env_steps": float(env_steps)} | {name.replace("__", "/"): value for name, value in more.items()}


@pytest.fixture
def begin(tmp_path: Path) -> Open:
    """`begin(path, env_steps, **kwargs)` → a writer of a trainer that begins there."""

    def make(path: str, env_steps: int = 0, **kwargs: Any) -> MetricWriter:
        config = minimal_config().model_dump(mode="json")
        return open_writer(path, kwargs, WrittenRun("run-1", tmp_path / "metrics", config, env_steps))

    return make


def write(writer: MetricWriter, *rows: Row, stream: str = "train", label: str = "") -> None:
    for each in rows:
        writer.write(stream, each, int(each["time/env_steps"]), label)


def table(folder: Path, stream: str = "train") -> list[dict[str, str]]:
    with (folder / "metrics" / f"{stream}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def json_rows(folder: Path, stream: str = "train") -> list[dict[str, Any]]:
    lines = (folder / "metrics" / f"{stream}.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


def board(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder))
    shown.Reload()
    return shown


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in board(folder).Scalars(name)]


# Tables


def test_each_row_is_in_each_file(begin: Open, tmp_path: Path) -> None:
    for path in ("csv", "jsonl", "tensorboard"):
        write(begin(path), row(64, rollout__ep_rew_mean=21.5), row(128, rollout__ep_rew_mean=30.25))
    assert [float(found["rollout/ep_rew_mean"]) for found in table(tmp_path)] == [21.5, 30.25]
    assert json_rows(tmp_path) == [row(64, rollout__ep_rew_mean=21.5), row(128, rollout__ep_rew_mean=30.25)]
    assert scalars(tmp_path / "metrics" / "tensorboard", "rollout/ep_rew_mean") == [(64, 21.5), (128, 30.25)]


def test_each_stream_is_a_table_and_its_rows_have_labels(begin: Open, tmp_path: Path) -> None:
    for path in ("csv", "jsonl"):
        writer = begin(path)
        write(writer, row(64), label="")
        write(writer, row(64, eval__ep_rew_mean=9.5), stream="evaluations", label="1_Step-64.ckpt")
        write(writer, row(64, episode__return=7.5), stream="episodes", label='worker "0", \n')
    assert table(tmp_path, "evaluations") == [
        {"checkpoint": "1_Step-64.ckpt", "time/env_steps": "64.0", "eval/ep_rew_mean": "9.5"}
    ]
    assert json_rows(tmp_path, "evaluations") == [{"checkpoint": "1_Step-64.ckpt", **row(64, eval__ep_rew_mean=9.5)}]
    assert table(tmp_path, "episodes")[0]["worker"] == json_rows(tmp_path, "episodes")[0]["worker"] == 'worker "0", \n'
    assert table(tmp_path) == [{"time/env_steps": "64.0"}]


def test_jsonl_writes_nonfinite_values_as_null(begin: Open, tmp_path: Path) -> None:
    write(begin("jsonl"), row(64, train__loss=float("inf"), train__explained_variance=float("nan")))
    assert json_rows(tmp_path) == [{"time/env_steps": 64.0, "train/loss": None, "train/explained_variance": None}]


@pytest.mark.parametrize("path", ["csv", "jsonl"])
def test_restart_drops_undone_rows_and_keeps_scores(begin: Open, tmp_path: Path, path: str) -> None:
    first = begin(path)
    for stream in ("train", "evaluations", "episodes"):
        write(first, *(row(steps, train__loss=1.0) for steps in (64, 128, 192, 256)), stream=stream)
    second = begin(path, 128)
    for stream in ("train", "evaluations", "episodes"):
        write(second, row(192, train__loss=2.0), stream=stream)
    read = table if path == "csv" else json_rows
    losses = {
        stream: [float(found["train/loss"]) for found in read(tmp_path, stream)]
        for stream in ("train", "evaluations", "episodes")
    }
    assert losses == {"train": [1, 1, 2], "evaluations": [1, 1, 1, 1, 2], "episodes": [1, 1, 2]}


@pytest.mark.parametrize("path", ["csv", "jsonl"])
def test_restart_drops_row_cut_off_by_crash(begin: Open, tmp_path: Path, path: str) -> None:
    write(begin(path), row(64, train__loss=1.0), row(128, train__loss=2.0))
    with (tmp_path / "metrics" / f"train.{path}").open("a") as file:
        file.write("192.0,3" if path == "csv" else '{"time/env_steps": 192.0, "tr')
    write(begin(path, 1000), row(192, train__loss=3.0))
    read = table if path == "csv" else json_rows
    assert [float(found["train/loss"]) for found in read(tmp_path)] == [1.0, 2.0, 3.0]
    assert [found.name for found in (tmp_path / "metrics").iterdir()] == [f"train.{path}"]


def test_csv_adds_column_for_new_metric_and_keeps_rows(begin: Open, tmp_path: Path) -> None:
    writer = begin("csv")
    write(writer, row(64, train__loss=1.0), row(128, train__loss=2.0, rollout__new=9.0), row(192, train__loss=3.0))
    found = table(tmp_path)
    assert [item["train/loss"] for item in found] == ["1.0", "2.0", "3.0"]
    assert [item["rollout/new"] for item in found] == ["", "9.0", ""]


def failing_open(path: Path, mode: str = "r", **options: Any) -> Any:
    """As on a disk that has room for what is written and for no more."""

    class Full(io.FileIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    return Full(path, mode.replace("b", ""))


@pytest.mark.parametrize("path", ["csv", "jsonl"])
def test_full_disk_leaves_no_partial_row(
    begin: Open, tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = begin(path)
    write(writer, row(64))
    with monkeypatch.context() as patch:
        patch.setattr(table_files, "_line", lambda fields: b"128.0")  # the part that still went onto it
        patch.setattr(Path, "open", failing_open)
        with pytest.raises(OSError, match="No space left"):
            write(writer, row(128))
    write(writer, row(192))
    read = table if path == "csv" else json_rows
    assert [float(found["time/env_steps"]) for found in read(tmp_path)] == [64.0, 192.0]


def test_restart_reads_only_the_end_of_a_table(tmp_path: Path) -> None:
    """Of a table of a terabyte, of which the middle was never written; reading all of it would take more than a day."""
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
    CsvFile(path, 64 * 25)
    assert begin < path.stat().st_size < (1 << 40) + 1000
    with path.open("rb") as file:
        file.seek(-20, os.SEEK_END)
        assert file.read().endswith(b"25,1600.0,0.5\r\n")


@pytest.mark.parametrize(
    "text", ["", "a,b\r\n1,2\r\n", "train/updates,time/env_ste", "time/env_steps\r\n", "\x00" * 100]
)
def test_table_file_restarts_when_header_is_unusable(begin: Open, tmp_path: Path, text: str) -> None:
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "train.csv").write_text(text)
    write(begin("csv", 100), row(64))
    assert table(tmp_path) == [{"time/env_steps": "64.0"}]


# TensorBoard


def test_tensorboard_shows_scalars_histograms_and_config(begin: Open, tmp_path: Path) -> None:
    from tensorboard.plugins.hparams import plugin_data_pb2

    writer = begin("tensorboard")
    write(writer, row(64, train__loss=0.5))
    write(writer, row(64, eval__ep_rew_mean=9.5), stream="evaluations")
    write(writer, row(64, episode__return=9.5), stream="episodes")
    writer.histogram("rollout/ep_rew", [1.0, 2.0, 2.0, 50.0], 64)
    shown = board(tmp_path / "metrics" / "tensorboard")
    tags = shown.Tags()
    assert {"train/loss", "eval/ep_rew_mean"} <= {*tags["scalars"]} and "episode/return" not in tags["scalars"]
    buckets = shown.Tensors("rollout/ep_rew")[0].tensor_proto
    assert shown.Tensors("rollout/ep_rew")[0].step == 64 and buckets.tensor_shape.dim[1].size == 3
    (text,) = shown.Tensors("config")
    assert b"CartPole-v1" in text.tensor_proto.string_val[0] and b"learning_rate" in text.tensor_proto.string_val[0]
    plugin = shown.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    parameters = plugin_data_pb2.HParamsPluginData.FromString(plugin).session_start_info.hparams
    assert parameters["environment.id"].string_value == "CartPole-v1"
    assert parameters["environment.num_envs"].number_value == 4.0


def test_tensorboard_hides_undone_rows(begin: Open, tmp_path: Path) -> None:
    write(begin("tensorboard"), *(row(steps, train__loss=1.0) for steps in (64, 128, 192, 256)))
    write(begin("tensorboard", 128), row(192, train__loss=2.0))
    assert scalars(tmp_path / "metrics" / "tensorboard", "train/loss") == [(64, 1.0), (128, 1.0), (192, 2.0)]


def test_tensorboard_writes_into_custom_folder(begin: Open, tmp_path: Path) -> None:
    write(begin("tensorboard", folder=str(tmp_path / "mine")), row(64, train__loss=1.0))
    assert scalars(tmp_path / "mine", "train/loss") == [(64, 1.0)]


def test_tensorboard_lacks_only_rows_of_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = TensorBoardWriter(WrittenRun("run-1", tmp_path, {}, env_steps=1))
    for step, full in ((64, True), (128, False), (192, True), (256, False)):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space") if full else nullcontext():
            if full:
                patch.setattr(Path, "open", failing_open)
            events.write("train", row(step, train__loss=0.5), step, "")
    assert scalars(tmp_path / "tensorboard", "train/loss") == [(128, 0.5), (256, 0.5)]


# Trackers, each as it works without an account


def needs(package: str) -> pytest.MarkDecorator:
    missing = find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed: pip install 'stagecoach-rl[{package}]'")


def a_run_with_a_restart(begin: Open, path: str, **kwargs: Any) -> None:
    for env_steps in (0, 128):
        writer = begin(path, env_steps, **kwargs)
        write(writer, *(row(env_steps + steps, train__loss=env_steps + 0.5) for steps in (64, 128)))
        write(writer, row(100, train__loss=float("nan")))
        write(writer, row(64, eval__ep_rew_mean=9.5), stream="evaluations", label="1_Step-64.ckpt")  # a late one
        write(writer, row(64, episode__return=3.5), stream="episodes", label="worker-0")
        write(writer, row(128, **{"fleet__fps": 777.5, "environment__../a#b": 1.25}), stream="fleet")
        writer.histogram("rollout/ep_rew", [1.0, 2.0, 3.0], 128)
        writer.histogram("rollout/ep_rew", [], 128)
        writer.flush()
        writer.close()


@pytest.mark.processes
@needs("wandb")
def test_wandb_is_offline_by_default(begin: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    a_run_with_a_restart(begin, "wandb", project="mine", tags=["a"])
    files = sorted((tmp_path / "metrics" / "wandb").glob("offline-run-*-run-1/run-run-1.wandb"))
    assert len(files) == 2, "one for each start, of one run"
    first, second = (file.read_bytes() for file in files)
    assert b"environment.id" in first and b"CartPole-v1" in first and b"mine" in first
    assert all(text in first for text in (b"eval/ep_rew_mean", b"9.5", b"fleet/fps", b"777.5", b"histogram"))
    assert b"128.5" in second and b"128.5" not in first and b"episode/return" not in first + second


@pytest.mark.processes
@needs("mlflow")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_mlflow_has_one_run_in_a_local_store(begin: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    a_run_with_a_restart(begin, "mlflow", experiment="mine")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'metrics' / 'mlflow' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("mine")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == ("run-1", "FINISHED")
    assert found.data.params["environment.id"] == "CartPole-v1" and len(found.data.params) > 100
    losses = [(item.step, item.value) for item in client.get_metric_history(found.info.run_id, "train/loss")]
    assert {(64, 0.5), (128, 0.5), (192, 128.5), (256, 128.5)} <= {*losses}
    assert {(item.step, item.value) for item in client.get_metric_history(found.info.run_id, "eval/ep_rew_mean")} == {
        (64, 9.5)
    }
    assert found.data.metrics["fleet/fps"] == 777.5 and "episode/return" not in found.data.metrics
    assert found.data.metrics["environment____a_b"] == 1.25


@needs("trackio")
def test_trackio_has_one_run_in_its_local_folder(begin: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trackio.sqlite_storage
    import trackio.utils

    for module in (trackio, trackio.utils, trackio.sqlite_storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    a_run_with_a_restart(begin, "trackio", project="mine")
    with closing(sqlite3.connect(tmp_path / "trackio" / "mine.db")) as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
        ((config,),) = database.execute("select config from configs").fetchall()
    assert {name for name, _, _ in rows} == {"run-1"} and json.loads(config)["environment.id"] == "CartPole-v1"
    found: list[tuple[int, Mapping[str, Any]]] = [(step, json.loads(metrics)) for _, step, metrics in rows]
    losses = [(step, metrics["train/loss"]) for step, metrics in found if "train/loss" in metrics and step != 100]
    assert losses == [(64, 0.5), (128, 0.5), (192, 128.5), (256, 128.5)]
    assert [step for step, metrics in found if "eval/ep_rew_mean" in metrics] == [64, 64]
    assert [step for step, metrics in found if "rollout/ep_rew" in metrics] == [128, 128]
    assert not any("episode/return" in metrics for _, metrics in found)


# One's own


class Seen(MetricWriter):
    def __init__(self, run: WrittenRun, limit: int = 3) -> None:
        super().__init__(run)
        self.limit = limit

    def write(self, stream: str, row: Mapping[str, float], step: int, label: str) -> None: ...


class Told(Callback):
    def __init__(self, run: WrittenRun) -> None:
        super().__init__(run)
        self.told: list[tuple[Any, ...]] = []

    def on_update(self, row: Row, env_steps: int) -> None:
        self.told.append(("update", row, env_steps))
        row.clear()

    def on_evaluation(self, checkpoint: str, row: Row, env_steps: int) -> None:
        self.told.append(("evaluation", checkpoint, row["eval/ep_rew_mean"], env_steps))

    def on_checkpoint(self, name: str, env_steps: int) -> None:
        self.told.append(("checkpoint", name, env_steps))


def test_custom_writer_gets_its_arguments(begin: Open) -> None:
    made = begin(f"{OWN}:Seen", limit=7)
    assert isinstance(made, Seen) and made.limit == 7 and made.run.run_id == "run-1"


def test_callback_gets_events_and_copies_of_rows(begin: Open) -> None:
    callback, update = begin(f"{OWN}:Told"), row(64, train__loss=1.0)
    write(callback, update)
    write(callback, row(64), stream="episodes")
    write(callback, row(64), stream="fleet")
    write(callback, row(64, eval__ep_rew_mean=9.5), stream="evaluations", label="1_Step-64.ckpt")
    callback.checkpoint("1_Step-64.ckpt", 64)
    assert isinstance(callback, Told)
    assert callback.told == [
        ("update", {}, 64), ("evaluation", "1_Step-64.ckpt", 9.5, 64), ("checkpoint", "1_Step-64.ckpt", 64),
    ]  # fmt: skip
    assert update == row(64, train__loss=1.0)
    bare = Callback(callback.run)
    write(bare, update)
    write(bare, update, stream="evaluations")
    bare.checkpoint("1_Step-64.ckpt", 64)


def test_callback_example_keeps_best_evaluation(begin: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "examples")
    check_writers(MetricsConfig(writers=("best_so_far:BestSoFar",)))
    callback = begin("best_so_far:BestSoFar")
    for version, score in ((1, 3.0), (2, 9.5), (3, 4.0)):
        write(callback, row(64 * version, eval__ep_rew_mean=score), stream="evaluations", label=f"{version}_Step.ckpt")
    assert (tmp_path / "metrics" / "best.txt").read_text() == "9.5 at 128 env steps, by 2_Step.ckpt\n"


# What is refused before a run starts


def refused(*chosen: Any, here: bool = True) -> str:
    with pytest.raises(ConfigError) as caught:
        check_writers(MetricsConfig(writers=chosen), here)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_built_in_writers_accept_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "find_spec", lambda name: True)
    chosen = [*writers.WRITERS, {"path": "wandb", "kwargs": {"project": "x", "mode": "offline"}}]
    check_writers(MetricsConfig(writers=tuple(chosen)))


def test_unusable_writer_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "metrics.writers=csvv: expected csv, jsonl, tensorboard, wandb, mlflow, trackio, or" in refused("csvv")
    assert "No module named 'no_such_module'" in refused("no_such_module:Writer")
    assert "has no attribute 'Writer'" in refused(f"{OWN}:Writer")
    assert "expected a subclass of stagecoach.MetricWriter, found 3" in refused("errno:ESRCH")
    assert "does not take {'folder': 'x'}" in refused({"path": "csv", "kwargs": {"folder": "x"}})
    assert "does not take {'limits': 3}" in refused("csv", {"path": f"{OWN}:Seen", "kwargs": {"limits": 3}})
    assert "does not take {'projekt': 'x'}" in refused({"path": "wandb", "kwargs": {"projekt": "x"}}, here=False)
    monkeypatch.setattr(writers, "find_spec", lambda name: None)
    for tracker in ("wandb", "mlflow", "trackio"):
        expected = (
            f"metrics.writers={tracker}: No module named '{tracker}'; pip install 'stagecoach-rl[{tracker}]' brings it"
        )
        assert refused(tracker) == expected
        check_writers(MetricsConfig(writers=(tracker,)), here=False)
