"""Recovery: a real run, and a worker that is killed."""

from __future__ import annotations

import pytest

from tests.benchmarks.conftest import MeasureQuickly


@pytest.mark.timeout(400)
def test_it_measures(measure_quickly: MeasureQuickly) -> None:
    result = measure_quickly("recovery", "worker")
    assert {measure.what for measure in result.measures} == {"worker-0, p50", "worker-0, p95"}
    assert all(measure.unit == "s" and measure.median > 0 for measure in result.measures)
    assert "the books balance after all kills" in result.remarks
