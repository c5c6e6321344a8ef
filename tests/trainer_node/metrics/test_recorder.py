"""The recorder: rows reach store, Redis and writers, and whatever fails there is told once and holds nothing up."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import redis

from stagecoach.shared.base.errors import StoreError
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.protocol.events import emit, read_events
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.metric_tail import newest_row, read_rows
from stagecoach.shared.storage.metric_log import (
    ENV_STEPS,
    EPISODES,
    EVALUATIONS,
    EVENTS,
    FLEET,
    TRAIN,
    UNIX_TIME,
    VERSION,
    read,
)
from stagecoach.trainer_node.metrics import recorder as module
from stagecoach.trainer_node.metrics.recorder import Recorder, evaluation_row
from stagecoach.trainer_node.metrics.writers import MetricWriter, WrittenRun
from tests.conftest import MakeRole, minimal_config
from tests.support.processes.waiting import eventually
from tests.support.services.memory_store import MemoryStore

SCORES = {
    "version": 2, "env_steps": 128, "episodes": 4, "mean_return": 9.5, "std_return": 1.5, "min_return": 7.0,
    "max_return": 11.0, "mean_length": 30.0, "success_rate": 0.5, "env_steps_played": 120,
    "agents": {"a": 4.0, "b": 5.5}, "policies": {"hunter": 9.5}, "metrics": {"height": 1.25},
    "confirmation": {"mean_return": 8.5, "episodes": 10, "agents": {"a": 3.0}},
}  # fmt: skip


KEPT = "tests.trainer_node.metrics.test_recorder:Kept"


class Kept(MetricWriter):
    """Keeps what it is told, and does what its test says."""

    told: list[tuple[Any, ...]]
    do: Callable[..., None]
    opened: Callable[[], None]

    def __init__(self, run: WrittenRun) -> None:
        super().__init__(run)
        type(self).opened()

    def write(self, stream: str, row: Mapping[str, float], step: int, label: str) -> None:
        self.told.append((stream, dict(row), step, label))
        type(self).do(stream, step)

    def checkpoint(self, name: str, step: int) -> None:
        self.told.append(("checkpoint", name, step))

    def flush(self) -> None:
        self.told.append(("flush",))

    def close(self) -> None:
        self.told.append(("close",))


class Recording:
    """Recorders of one run, one after another."""

    def __init__(self, client: redis.Redis, run_id: str, folder: Path) -> None:
        self.client, self.run_id, self.folder, self.epoch = client, run_id, folder, 0
        self.store = MemoryStore()
        self.open: list[Recorder] = []

    def begin(self, *writers: Any, version: int = 0, env_steps: int = 0, folder: bool = True) -> Recorder:
        self.epoch += 1
        config: Config = minimal_config(metrics={"writers": list(writers)})
        place, began = self.folder if folder else None, (self.epoch, version, env_steps, version)
        self.open.append(Recorder(self.client, self.run_id, config, place, self.store, began))
        return self.open[-1]

    def events(self) -> list[str]:
        return [event.text for event in read_events(self.client, self.run_id) if event.kind == "metrics"]

    def rows(self, stream: str) -> list[tuple[str, dict[str, float]]]:
        return [item for _, rows in read(self.store, stream) for item in rows.named()]


@pytest.fixture
def recording(make_role: MakeRole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recording]:
    role = make_role()
    role.flow.take_over()
    monkeypatch.setattr(Kept, "told", [], raising=False)
    monkeypatch.setattr(Kept, "do", staticmethod(lambda stream, step: None), raising=False)
    monkeypatch.setattr(Kept, "opened", staticmethod(lambda: None), raising=False)
    made = Recording(role.redis, role.run_id, tmp_path / "metrics")
    yield made
    for recorder in made.open:
        recorder.close()


def row(env_steps: float, version: int = 1, **more: float) -> dict[str, float]:
    named = {name.replace("__", "/"): value for name, value in more.items()}
    return {ENV_STEPS: float(env_steps), VERSION: float(version)} | named


def without_time(found: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in found.items() if name != UNIX_TIME}


def test_row_reaches_store_redis_and_writers(recording: Recording) -> None:
    recorder = recording.begin(KEPT)
    recorder.record(TRAIN, row(64, train__loss=0.5))
    recorder.record(EPISODES, row(64, episode__return=3.0), "worker-0")
    recorder.checkpointed("1_Step-64.ckpt")
    recorder.store()
    recorder.close()
    assert [without_time(found) for _, found in recording.rows(TRAIN)] == [row(64, train__loss=0.5)]
    assert [label for label, _ in recording.rows(EPISODES)] == ["worker-0"]
    (tail,) = read_rows(recording.client, recording.run_id)
    assert (tail.epoch, tail.number, tail.row["train/loss"]) == (1, 0, 0.5), "as in the store; episodes are not there"
    told = [(item[0], *item[2:]) for item in Kept.told]
    assert told == [("train", 64, ""), ("episodes", 64, "worker-0"), ("checkpoint", 64), ("flush",), ("close",)]
    assert recording.rows(TRAIN)[0][1][UNIX_TIME] == Kept.told[0][1][UNIX_TIME] > 1.7e9


def test_file_writers_are_left_out_without_folder(recording: Recording) -> None:
    recorder = recording.begin("csv", "jsonl", "tensorboard", KEPT, folder=False)
    recorder.record(TRAIN, row(64))
    recorder.close()
    assert [item[0] for item in Kept.told] == ["train", "close"]
    assert not recording.folder.exists() and recording.events() == [] and not recorder.failures


def test_failing_writer_is_reported_once_and_others_get_all_rows(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(stream: str, step: int) -> None:
        raise RuntimeError("no\nway")

    monkeypatch.setattr(Kept, "do", staticmethod(fail))
    recorder = recording.begin(KEPT, "csv")
    for step in (64, 128, 192):
        recorder.record(TRAIN, row(step))
    recorder.store()
    assert recorder.failures == {KEPT: 3}
    (event,) = recording.events()
    assert event.startswith(f"{KEPT} cannot be written, training continues: RuntimeError: no")
    assert (recording.folder / "train.csv").read_text().count("\n") == 4
    assert len(recording.rows(TRAIN)) == 3


def test_unopenable_writer_is_reported_as_event(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("the tracker is away")

    monkeypatch.setattr(Kept, "opened", staticmethod(fail))
    recorder = recording.begin(KEPT, {"path": "csv", "kwargs": {"separator": ";"}}, "jsonl")
    recorder.record(TRAIN, row(64))
    recorder.store()
    assert recorder.failures == {KEPT: 1, "csv": 1}
    assert (recording.folder / "train.jsonl").exists() and len(recording.events()) == 2


def test_hung_writer_delays_neither_rows_nor_store(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(Kept, "do", staticmethod(lambda stream, step: hangs.wait(60) and None))
    monkeypatch.setattr(module, "_FLUSH_SECONDS", 0.05)
    monkeypatch.setattr(module, "_QUEUED", 5)
    recorder = recording.begin(KEPT)
    for step in range(20):
        recorder.record(TRAIN, row(step))
    recorder.store()
    recorder.store()
    assert len(recording.rows(TRAIN)) == 20
    assert any("are left out" in text for text in recording.events())
    hangs.set()


def test_writer_hung_at_opening_delays_no_other(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(Kept, "opened", staticmethod(lambda: hangs.wait(60) and None))
    monkeypatch.setattr(module, "_FLUSH_SECONDS", 4.0)
    recorder = recording.begin(KEPT, "csv")
    for step in (64, 128, 192):
        recorder.record(TRAIN, row(step))
    recorder.store()
    assert (recording.folder / "train.csv").read_text().count("\n") == 4
    (event,) = recording.events()
    assert event.startswith(f"{KEPT} is slow, training continues: it is still busy")
    assert not recorder.failures, "it has lost nothing"
    hangs.set()
    recorder.close()
    assert [item[0] for item in Kept.told] == ["train"] * 3 + ["flush", "close"], "none is lost to it"


def test_rows_left_by_hung_writer_are_reported_at_end(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(Kept, "opened", staticmethod(lambda: hangs.wait(60) and None))
    recorder = recording.begin(KEPT)
    recorder.record(TRAIN, row(64))
    recorder.close(0.1)
    (event,) = recording.events()
    assert event.endswith("2 calls to it are still waiting as the trainer ends; their rows are in the store")
    hangs.set()


def test_failing_redis_is_counted_and_reported_later(recording: Recording) -> None:
    flow = RunKeys(recording.run_id).flow
    saved: Any = recording.client.dump(flow)
    recording.client.delete(flow)
    recording.client.rpush(flow, "no hash")  # each script's first command is one on the flow
    recorder = recording.begin(KEPT)
    recorder.record(TRAIN, row(64))
    eventually(lambda: len(Kept.told) == 1 and recorder.failures["Redis"] == 1)
    recording.client.restore(flow, 0, saved, replace=True)
    recorder.record(TRAIN, row(128))
    recorder.close()
    assert newest_row(recording.client, recording.run_id)[ENV_STEPS] == 128 and recorder.failures["Redis"] == 1


def test_metric_names_are_printable_and_bounded(recording: Recording) -> None:
    name = "environment/" + os.fsdecode(b"caf\xe9") + '\x1b]52;c;\x07,"\n'
    recorder = recording.begin(KEPT)
    recorder.record(TRAIN, row(64) | {name: 2.5, "x" * 1000: 1.0})
    recorder.store()
    (_, found), *_ = recording.rows(TRAIN)
    assert found['environment/caf\\udce9\\x1b]52;c;\\x07,"\\n'] == 2.5 and max(map(len, found)) < 150
    assert Kept.told[0][1] == found and not recorder.failures


def test_number_of_metric_names_is_bounded(recording: Recording) -> None:
    """60 updates of an environment that names each episode made 441 columns; all other metrics keep their place."""
    recorder = recording.begin()
    recorder.record(TRAIN, row(64) | {f"environment/{number}": 1.0 for number in range(2000)})
    recorder.record(TRAIN, row(128, environment__7=2.0, environment__new=1.0, train__loss=1.0))
    recorder.record(EVALUATIONS, row(128, eval__environment__new=1.0))
    recorder.store()
    first, second = (found for _, found in recording.rows(TRAIN))
    assert len(without_time(first)) == 2 + 128
    assert without_time(second) == row(128, environment__7=2.0, train__loss=1.0)
    assert without_time(recording.rows(EVALUATIONS)[0][1]) == row(128, eval__environment__new=1.0)
    (told,) = recording.events()
    assert "some metrics environment/… cannot be written" in told and "more than 128 names, 'environment/128'" in told
    recorder.record(TRAIN, row(192) | {f"agent/{number}": 1.0 for number in range(2000)})
    recorder.store()
    assert recorder.failures["the metrics"] == 1003, "of 1,000 names three were there before"


def test_rows_that_a_restart_undid_are_void_and_recorded_again(recording: Recording) -> None:
    first = recording.begin("csv")
    for version in (1, 2, 3):
        first.record(TRAIN, row(64 * version, version, train__loss=1.0))
    first.store()
    first.record(TRAIN, row(256, 4, train__loss=1.0))
    first.close()
    second = recording.begin("csv", version=2, env_steps=128)
    for version in (3, 4):
        second.record(TRAIN, row(64 * version, version, train__loss=2.0))
    second.store()
    assert [found["train/loss"] for _, found in recording.rows(TRAIN)] == [1, 1, 2, 2]
    lines = (recording.folder / "train.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines[1:]] == ["64.0", "128.0", "192.0", "256.0"]


def test_unavailable_store_loses_no_row(recording: Recording) -> None:
    recorder = recording.begin()
    recorder.record(TRAIN, row(64))
    recording.store.fails_in = 0
    with pytest.raises(StoreError):
        recorder.store()
    recorder.record(TRAIN, row(128))
    recorder.store()
    assert [found[ENV_STEPS] for _, found in recording.rows(TRAIN)] == [64, 128]


def test_rows_are_due_for_the_store_after_a_while(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = recording.begin()
    assert not recorder.due
    recorder.record(TRAIN, row(64))
    assert not recorder.due
    monkeypatch.setattr(module, "_STORE_SECONDS", 0.0)
    assert recorder.due
    recorder.store()
    assert not recorder.due


def test_evaluation_is_recorded_once_across_restarts(recording: Recording) -> None:
    recorder = recording.begin("csv")
    assert recorder.take_evaluations({"1_Step-64.ckpt": SCORES | {"version": 1, "env_steps": 64}}) == {"1_Step-64.ckpt"}
    both = {"1_Step-64.ckpt": SCORES, "2_Step-128.ckpt": SCORES}
    assert recorder.take_evaluations(both) == {*both}
    recorder.store()
    recorder.close()
    again = recording.begin("csv", version=0, env_steps=0)
    assert again.take_evaluations(both | {"3_Step-192.ckpt": SCORES}) == {*both, "3_Step-192.ckpt"}
    again.store()
    again.close()
    rows = recording.rows(EVALUATIONS)
    assert [label for label, _ in rows] == ["1_Step-64.ckpt", "2_Step-128.ckpt", "3_Step-192.ckpt"]
    assert [found["time/test_episodes"] for _, found in rows] == [14, 28, 42], "second ones too"
    assert [found["time/test_env_steps"] for _, found in rows] == [120, 240, 360]
    assert rows[0][1][ENV_STEPS] == 64 and rows[0][1]["eval/ep_rew_mean"] == 9.5
    assert (recording.folder / "evaluations.csv").read_text().count(".ckpt") == 3


def test_evaluation_row_has_spread_agents_and_confirmation() -> None:
    assert evaluation_row(SCORES) == {
        ENV_STEPS: 128.0, VERSION: 2.0, "eval/ep_rew_mean": 9.5, "eval/ep_rew_std": 1.5, "eval/ep_rew_min": 7.0,
        "eval/ep_rew_max": 11.0, "eval/ep_len_mean": 30.0, "eval/success_rate": 0.5, "eval/episodes": 4.0,
        "eval/ep_rew_mean/a": 4.0, "eval/ep_rew_mean/b": 5.5, "eval/ep_rew_mean/hunter": 9.5,
        "eval/environment/height": 1.25, "eval/confirmation/ep_rew_mean": 8.5, "eval/confirmation/episodes": 10.0,
        "eval/confirmation/ep_rew_mean/a": 3.0,
    }  # fmt: skip
    assert evaluation_row({"version": 0, "success_rate": None}) == {ENV_STEPS: 0.0, VERSION: 0.0}


def test_event_is_recorded_once_across_restarts(recording: Recording) -> None:
    emit(recording.client, recording.run_id, "run", "it begins")
    recorder = recording.begin()
    recorder.store()
    emit(recording.client, recording.run_id, "worker", "one\tmore")
    recorder.store()
    recorder.store()
    again = recording.begin()
    emit(recording.client, recording.run_id, "run", "it ends")
    again.store()
    labels = [label for label, _ in recording.rows(EVENTS)]
    assert labels == ["run\tit begins", "worker\tone\\tmore", "run\tit ends"]
    assert all(found[UNIX_TIME] > 1.7e9 for _, found in recording.rows(EVENTS))


def test_new_recorder_reads_one_segment_of_events(recording: Recording) -> None:
    """After many restarts too: in a walk of 24 virtual hours (seed 4) a stop read those of all former trainers."""
    for number in range(5):
        emit(recording.client, recording.run_id, "run", str(number))
        recording.begin().store()
    gets = list[None]()
    recording.store.before_get = lambda: gets.append(None)
    recording.begin().take_events()
    assert len(gets) == 1


def test_fleet_rows_are_recorded_periodically(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.01)
    recorder = recording.begin(env_steps=640)

    def seen() -> bool:
        recorder.store()
        return bool(recording.rows(FLEET))

    eventually(seen)
    _, found = recording.rows(FLEET)[0]
    assert found[ENV_STEPS] == 640 and {"fleet/workers", "log/bytes", "log/window"} <= {*found}
    assert not recorder.failures


def test_after_its_end_nothing_is_written_or_raised(recording: Recording) -> None:
    recorder = recording.begin(KEPT)
    recorder.close()
    recorder.record(TRAIN, row(64))
    recorder.histogram("rollout/ep_rew", [1.0], 64)
    recorder.store()
    assert Kept.told == [("close",)] and len(recording.rows(TRAIN)) == 1
    assert json.dumps(recorder.failures) == "{}"
