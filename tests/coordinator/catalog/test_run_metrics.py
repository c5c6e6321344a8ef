"""Curves: bins are what NumPy computes of all rows, and the live tail joins the store without gap or repeat."""

from __future__ import annotations

import numpy as np
import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from stagecoach.coordinator.catalog import run_metrics
from stagecoach.coordinator.catalog.run_metrics import Bins, Curves, Recorded, Series, all_rows
from stagecoach.shared.protocol.events import record_evaluation
from stagecoach.shared.protocol.metric_tail import append_row
from stagecoach.shared.storage.metric_log import ENV_STEPS, EVALUATIONS, TRAIN, UNIX_TIME, VERSION, MetricStream, Rows
from tests.conftest import MakeRole
from tests.support.services.memory_store import MemoryStore

Row = dict[str, float]


def row(number: int, **more: float) -> Row:
    return {ENV_STEPS: 10.0 * number, UNIX_TIME: 1e9 + number, VERSION: float(number), **more}


@settings(max_examples=60)
@given(st.integers(1, 6), st.lists(st.lists(st.none() | st.integers(-50, 50), max_size=30), max_size=8), st.booleans())
def test_bins_are_what_numpy_computes_of_all_rows(points: int, parts: list[list[int | None]], late_name: bool) -> None:
    bins, rows = Bins(points), list[Row]()
    for part in parts:
        new = [row(len(rows) + at, **({} if value is None else {"x": float(value)})) for at, value in enumerate(part)]
        rows += new
        bins.add(Rows.of([("", item) for item in new]))
    if late_name and rows:
        rows.append(row(len(rows), late=1.0))
        bins.add(Rows.of([("", rows[-1])]))
    if not rows:
        assert bins.names == []
        return
    stride = 1
    while -(-len(rows) // stride) > 2 * points:
        stride *= 2
    groups = [rows[begin : begin + stride] for begin in range(0, len(rows), stride)]
    assert len(groups) <= 2 * points
    for name in bins.names:
        told = [[item[name] for item in group if name in item] for group in groups]
        shown = bins[name]
        np.testing.assert_allclose(shown.mean, [np.mean(values) for values in told if values])
        assert shown.low.tolist() == [min(values) for values in told if values]
        assert shown.high.tolist() == [max(values) for values in told if values]
        steps = [
            np.mean([item[ENV_STEPS] for item in group]) for group, values in zip(groups, told, strict=True) if values
        ]
        np.testing.assert_allclose(shown.env_steps, steps)
    assert ("late" in bins.names) == late_name


def test_million_rows_fit_in_few_thousand_bins() -> None:
    bins, size = Bins(1000), 1 << 16
    for begin in range(0, 1_000_000, size):
        numbers = np.arange(begin, min(begin + size, 1_000_000), dtype=np.float64)
        bins.add(Rows({ENV_STEPS: numbers, UNIX_TIME: numbers, "x": numbers % 7}, [""] * len(numbers)))
    shown = bins["x"]
    assert 900 < len(shown.mean) <= 2000 and {*shown.low} == {0.0} and {*shown.high} == {6.0}
    assert isinstance(shown, Series) and {*shown.as_lists()} == {"env_steps", "unix_seconds", "mean", "low", "high"}


class Live:
    """A trainer that records into a store and Redis, a row at a time."""

    def __init__(self, client: redis.Redis, run_id: str) -> None:
        self.client, self.run_id, self.store, self.epoch = client, run_id, MemoryStore(), 0
        self.version = 0
        self.begin(0)

    def begin(self, version: int) -> None:
        self.epoch, self.version = self.epoch + 1, version
        self.stream = MetricStream(self.store, self.run_id, TRAIN, self.epoch, version, 10 * version)

    def record(self, count: int, value: float = 0.0) -> None:
        for _ in range(count):
            self.version += 1
            made = row(self.version, x=value)
            number = self.stream.append(made)
            append_row(self.client, self.run_id, self.epoch, number, made)


@pytest.fixture
def live(make_role: MakeRole) -> Live:
    role = make_role()
    return Live(role.redis, role.run_id)


def shown(curves: Curves) -> list[tuple[float, float]]:
    bins = curves.bins
    return [] if not bins.names else list(zip(bins["x"].env_steps.tolist(), bins["x"].mean.tolist(), strict=True))


def expected(first: int, last: int, value: float = 0.0) -> list[tuple[float, float]]:
    return [(10.0 * number, value) for number in range(first, last + 1)]


def test_tail_joins_store_without_gap_or_repeat(live: Live) -> None:
    curves = Curves(live.run_id)
    curves.refresh(live.store, live.client)
    assert shown(curves) == []
    last = 0
    for recorded, written in ((3, False), (2, True), (1, True), (4, False), (0, False), (5, True), (1, False)):
        live.record(recorded)
        last += recorded
        if written:
            live.stream.write()
        curves.refresh(live.store, live.client)
        assert shown(curves) == expected(1, last)
        late = Curves(live.run_id)
        late.refresh(live.store, live.client)
        assert shown(late) == expected(1, last), "one who looks now for the first time sees the same"


def test_rows_that_redis_has_no_more_come_from_the_store(live: Live) -> None:
    curves = Curves(live.run_id)
    live.record(5)
    curves.refresh(live.store, live.client)
    live.record(5)
    live.stream.write()
    live.client.delete(f"stagecoach:{{{live.run_id}}}:metrics")
    live.record(2)
    curves.refresh(live.store, live.client)
    assert shown(curves) == expected(1, 12)


def test_curves_drop_rows_voided_by_restart(live: Live) -> None:
    curves = Curves(live.run_id)
    live.record(6)
    live.stream.write()
    live.record(2)
    curves.refresh(live.store, live.client)
    assert shown(curves) == expected(1, 8)
    live.begin(4)
    live.record(1, value=1.0)
    late = Curves(live.run_id)
    for who in (curves, late):
        who.refresh(live.store, live.client)
        assert shown(who) == expected(1, 8), "nothing tells yet what is void"
    live.stream.write()
    late.refresh(live.store, live.client)
    curves.refresh(live.store, live.client)
    assert shown(late) == expected(1, 4) + expected(5, 5, 1.0)
    assert shown(curves) == expected(1, 4) + expected(5, 5, 1.0)
    live.record(3, value=1.0)
    curves.refresh(live.store, live.client)
    assert shown(curves) == expected(1, 4) + expected(5, 8, 1.0)
    assert sum(map(len, all_rows(live.store, TRAIN, live.client, live.run_id))) == 8


def test_finished_run_is_read_from_store_at_intervals(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    curves, looks = Curves(live.run_id), 0
    live.record(4)
    live.stream.write()

    def look() -> None:
        nonlocal looks
        looks += 1

    live.store.before_get = look
    for _ in range(3):
        curves.refresh(live.store, None)
    assert shown(curves) == expected(1, 4) and looks == 1
    monkeypatch.setattr(run_metrics, "_STORE_SECONDS", 0.0)
    live.record(1)
    live.stream.write()
    curves.refresh(live.store, None)
    assert shown(curves) == expected(1, 5) and looks == 2


def test_all_evaluations_join_store_and_redis(live: Live) -> None:
    stream = MetricStream(live.store, live.run_id, EVALUATIONS, 1, 0, 0)
    stream.append(row(1, **{"eval/ep_rew_mean": 1.0}), "1_Step-10.ckpt")
    stream.write()
    for name, version in (("1_Step-10.ckpt", 1), ("2_Step-20.ckpt", 2)):
        record_evaluation(live.client, live.run_id, name, {"version": version, "mean_return": 9.5})
    found = [item for part in all_rows(live.store, EVALUATIONS, live.client, live.run_id) for item in part.named()]
    assert [(label, item["eval/ep_rew_mean"]) for label, item in found] == [
        ("1_Step-10.ckpt", 1),
        ("2_Step-20.ckpt", 9.5),
    ]
    recorded = Recorded(EVALUATIONS)
    for _ in range(2):
        recorded.refresh(live.store)
    assert [label for label, _ in recorded.rows] == ["1_Step-10.ckpt"]
