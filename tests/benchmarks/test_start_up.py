"""The start-up benchmark, quickly: one start, whose milestones come in the order in which they must."""

from __future__ import annotations

import pytest

from tests.benchmarks.conftest import MeasureQuickly


@pytest.mark.timeout(300)
def test_milestones_of_a_start(measure_quickly: MeasureQuickly) -> None:
    found = measure_quickly("start-up")
    seconds = {measure.what: measure.samples[0] for measure in found.measures}
    order = [
        "imports and checks are done", "Redis serves", "the S3 server serves", "Ray is joined", "roles are asked for",
        "the trainer's process has its imports", "first fragment", "first update",
    ]  # fmt: skip
    assert [seconds[name] for name in order] == sorted(seconds[name] for name in order)
    assert 0 < seconds["Ray's own start"] < seconds["first update"]
    assert {measure.unit for measure in found.measures} == {"s"}
    assert [measure.aim for measure in found.measures if measure.what == "first update"] == [8.0]
