"""Rows in the store: whatever restarts, fails and is merged, the surviving history is read, each row once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stagecoach.shared.base.errors import MetricsDamaged, StoreError
from stagecoach.shared.storage import metric_log
from stagecoach.shared.storage.metric_log import (
    ENV_STEPS,
    EPISODES,
    EVALUATIONS,
    EVENTS,
    FLEET,
    TRAIN,
    VERSION,
    MetricStream,
    Rows,
    decode,
    encode,
    read,
    segments,
)
from stagecoach.shared.storage.object_store import ObjectStore
from tests.support.services.memory_store import MemoryStore

RUN = "run-1"
Row = dict[str, float]


def numbers(store: MemoryStore, stream: str, after: tuple[int, int] = (0, -1)) -> list[float]:
    """The rows that are read, each by a number of its own."""
    return [row["number"] for _, rows in read(store, stream, after) for _, row in rows.named()]


class Trainers:
    """The trainers of a run, one after another, and what a reader must find of them."""

    def __init__(self, stream: str) -> None:
        self.store, self.name, self.made, self.epoch = MemoryStore(), stream, 0, 0
        self.history: list[tuple[int, float]] = []
        """Version and number of each row that nothing undid."""
        self.written: list[float] = []
        """The rows that are in the store for certain, whatever was undone."""
        self.durable = 0
        self.begin(0)

    def begin(self, version: int) -> None:
        """A new trainer takes up the checkpoint of this version; the former one's pending rows are gone."""
        self.epoch, self.version, self.told = self.epoch + 1, version, False
        self.history = [row for row in self.history if row[0] <= version]
        self.durable = len(self.history)
        self.stream = MetricStream(self.store, RUN, self.name, self.epoch, version, 10 * version)
        self.pending: list[float] = []

    def work(self, rows: int, failing: int | None, late: bool) -> None:
        for _ in range(rows):
            self.version, self.made = self.version + 1, self.made + 1
            row = {VERSION: self.version, ENV_STEPS: 10.0 * self.version, "number": self.made}
            self.stream.append(row | ({"odd": 1.0} if self.made % 2 else {}), f"label {self.made}")
            self.history.append((self.version, self.made))
            self.pending.append(self.made)
        self.store.fails_in, self.store.fails_late = failing, late
        try:
            self.stream.write()
        except StoreError:
            return
        finally:
            self.store.fails_in = None
        self.written += self.pending
        self.told, self.pending, self.durable = True, [], len(self.history)

    def check(self) -> None:
        found = numbers(self.store, self.name)
        surviving = [number for _, number in self.history]
        if self.name == TRAIN:
            assert found[: self.durable] == surviving[: self.durable]
            if self.told:  # until then nothing in the store says that there is a new trainer
                assert found == surviving[: len(found)]
        else:
            assert [number for number in found if number in set(self.written)] == self.written
            assert found == sorted(set(found))


WORK = st.tuples(st.integers(0, 5), st.none() | st.integers(0, 12), st.booleans())
RESTART = st.floats(0, 1)
ENOUGH_TO_MERGE = [(1, None, False)] * 20


@settings(max_examples=60)
@given(st.sampled_from([TRAIN, EVALUATIONS]), st.lists(st.lists(WORK, min_size=1, max_size=20) | RESTART, max_size=8))
@example(TRAIN, [ENOUGH_TO_MERGE, 0.5, ENOUGH_TO_MERGE, 0.3, ENOUGH_TO_MERGE])
@example(TRAIN, [ENOUGH_TO_MERGE[:7], [(1, 1, True), (1, None, False)], ENOUGH_TO_MERGE])
def test_read_returns_rows_of_the_surviving_history(
    stream: str, actions: list[list[tuple[int, int | None, bool]] | float]
) -> None:
    trainers = Trainers(stream)
    for action in actions:
        if isinstance(action, float):
            kept = trainers.history[: trainers.durable]
            trainers.begin(kept[int(action * (len(kept) - 1))][0] if kept else 0)
        else:
            for rows, failing, late in action:
                trainers.work(rows, failing, late)
                trainers.check()
        trainers.check()
    trainers.work(1, None, False)
    trainers.check()
    if stream == TRAIN:
        assert numbers(trainers.store, stream) == [number for _, number in trainers.history]


@pytest.mark.parametrize("late", [False, True])
def test_merge_survives_death_at_each_write(late: bool) -> None:
    for failing in range(1, 12):
        trainers = Trainers(TRAIN)
        for number in range(8):
            trainers.work(1, failing if number == 7 else None, late)
        assert numbers(trainers.store, TRAIN) == list(range(1, 9))
        trainers.begin(8)
        trainers.work(1, None, False)
        assert numbers(trainers.store, TRAIN) == list(range(1, 10))


def test_many_rows_become_few_objects() -> None:
    trainers, sizes = Trainers(TRAIN), list[int]()
    put = trainers.store.put

    def counted(key: str, data: bytes) -> None:
        sizes.append(len(data))
        put(key, data)

    trainers.store.put = counted  # type: ignore[method-assign]
    for _ in range(1000):
        trainers.work(1, None, False)
    assert len(trainers.store.objects) < 40
    assert sum(sizes) < 5 * sum(map(len, trainers.store.objects.values())) + 1000 * 1000
    assert numbers(trainers.store, TRAIN) == list(range(1, 1001))


def test_reader_continues_while_segments_are_merged() -> None:
    trainers = Trainers(TRAIN)
    for _ in range(20):
        trainers.work(1, None, False)

    def more() -> None:
        trainers.store.before_get = lambda: None  # the merge reads, too
        trainers.work(1, None, False)
        trainers.store.before_get = more

    trainers.store.before_get = more
    found = numbers(trainers.store, TRAIN)
    assert found == list(range(1, len(found) + 1)) and len(found) >= 20


def test_leftover_of_cut_off_put_is_skipped() -> None:
    """A folder without an object, as a file store may be left with by a crash."""
    trainers = Trainers(TRAIN)
    trainers.work(1, None, False)
    gone = MemoryStore()
    gone.folders = trainers.store.folders  # type: ignore[method-assign]
    assert numbers(gone, TRAIN) == []


def test_reading_begins_behind_what_is_known() -> None:
    trainers = Trainers(TRAIN)
    for _ in range(30):
        trainers.work(1, None, False)
    everything = numbers(trainers.store, TRAIN)
    for known in range(30):
        assert numbers(trainers.store, TRAIN, (1, known)) == everything[known + 1 :]
    *_, (position, _) = read(trainers.store, TRAIN)
    assert position == (1, 29) and numbers(trainers.store, TRAIN, position) == []
    trainers.begin(30)
    trainers.work(2, None, False)
    assert numbers(trainers.store, TRAIN, position) == [31.0, 32.0]


def test_undone_training_rows_vanish_but_scores_and_events_stay() -> None:
    for stream, stays in ((TRAIN, False), (EPISODES, False), (EVALUATIONS, True), (EVENTS, True), (FLEET, True)):
        trainers = Trainers(stream)
        trainers.work(4, None, False)
        trainers.begin(2)
        trainers.work(1, None, False)
        assert numbers(trainers.store, stream) == ([1, 2, 3, 4, 5] if stays else [1, 2, 5]), stream


def test_returning_to_an_old_line_of_training_shows_its_rows() -> None:
    store = MemoryStore()

    def work(epoch: int, version: int, env_steps: int, parent: int, rows: int) -> list[float]:
        stream = MetricStream(store, RUN, TRAIN, epoch, version, env_steps, parent)
        for number in range(1, rows + 1):
            stream.append({VERSION: version + number, ENV_STEPS: env_steps + 10 * number, "number": version + number})
        stream.write()
        return numbers(store, TRAIN)

    assert work(1, 0, 0, 0, 8) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert work(2, 20, 40, 4, 5) == [1, 2, 3, 4, 21, 22, 23, 24, 25], "back to version 4"
    assert work(3, 23, 70, 20, 1) == [1, 2, 3, 4, 21, 22, 23, 24], "killed after the checkpoint 23"
    assert work(4, 40, 70, 7, 2) == [1, 2, 3, 4, 5, 6, 7, 41, 42], "to version 7 of the first line"
    assert work(5, 60, 60, 22, 1) == [1, 2, 3, 4, 21, 22, 61], "to version 22 of the second one"
    assert work(6, 80, 20, 2, 1) == [1, 2, 81], "to what all have in common"


def test_rows_keep_names_labels_and_values(any_store: ObjectStore) -> None:
    stream = MetricStream(any_store, RUN, EPISODES, 3, -1, 0)
    rows: list[tuple[str, Row]] = [
        ("worker-0", {VERSION: -1.0, ENV_STEPS: 0.0, "environment/ünï \\x1b": 1e300}),
        ("", {VERSION: -1.0, ENV_STEPS: 0.0, "loss": float("inf")}),
        ("worker-1\tx\n", {VERSION: -1.0, ENV_STEPS: 0.0, "loss": -0.125}),
    ]
    assert [stream.append(row, label) for label, row in rows] == [0, 1, 2]
    stream.write()
    assert stream.pending == 0
    stream.append({VERSION: 0.0, ENV_STEPS: 5.0}, "last")
    stream.write()
    assert [item for _, found in read(any_store, EPISODES) for item in found.named()] == [
        *rows, ("last", {VERSION: 0.0, ENV_STEPS: 5.0}),
    ]  # fmt: skip
    (first, second) = segments(any_store, EPISODES)
    assert (first.epoch, first.version, first.first, first.last, second.first) == (3, -1, 0, 2, 3)


def damaged() -> Iterator[bytes]:
    blob = encode(RUN, TRAIN, Rows.of([("a", {"x": 1.0}), ("b", {"x": 2.0})]))
    yield from (b"", b"{}", blob[:-1], blob[: len(blob) // 2], bytes(len(blob)), blob + b"x")
    for at in range(0, len(blob), 7):
        changed = bytearray(blob)
        changed[at] ^= 1
        yield bytes(changed)
    yield encode(RUN, TRAIN, Rows({"x": np.zeros(3)}, ["only one"]))
    yield encode(RUN, TRAIN, Rows({"x": np.zeros(1, np.float32)}, ["of another type"]))


def test_damaged_segment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    trainers = Trainers(TRAIN)
    trainers.work(2, None, False)
    (key,) = trainers.store.objects
    for blob in damaged():
        trainers.store.objects[key] = blob
        with pytest.raises(MetricsDamaged, match=r"metrics/train/1_0_0_0_1_0/rows\.safetensors cannot be read"):
            numbers(trainers.store, TRAIN)
    monkeypatch.setattr(metric_log, "FORMAT", 2)
    blob = encode(RUN, TRAIN, Rows.of([]))
    monkeypatch.undo()
    with pytest.raises(MetricsDamaged, match="format 2"):
        decode(blob, "key")


def test_damaged_segment_is_skipped_on_request() -> None:
    trainers = Trainers(TRAIN)
    for _ in range(4):
        trainers.work(1, None, False)
    trainers.store.objects["metrics/train/1_0_0_1_1_0/rows.safetensors"] = b"garbage"
    for _ in range(20):  # what would be merged with it, and what comes after
        trainers.stream.append({VERSION: 9.0, ENV_STEPS: 90.0, "number": 9.0})
        trainers.stream.write()
    told: list[MetricsDamaged] = []
    found = [row["number"] for _, rows in read(trainers.store, TRAIN, damaged=told.append) for _, row in rows.named()]
    assert found == [1, 3, 4] + [9] * 20 and len(told) == 1


def test_other_objects_beside_the_segments_are_left_alone() -> None:
    trainers = Trainers(TRAIN)
    trainers.work(2, None, False)
    trainers.store.objects |= {"metrics/train/notes/rows.safetensors": b"", "metrics/train/1_2_3/rows.safetensors": b""}
    assert numbers(trainers.store, TRAIN) == [1, 2]
