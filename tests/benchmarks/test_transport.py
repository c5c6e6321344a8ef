"""Transport: our own path and raw Redis, on a real server."""

from __future__ import annotations

import pytest

from tests.benchmarks.conftest import MeasureQuickly


@pytest.mark.timeout(300)
def test_it_measures(measure_quickly: MeasureQuickly) -> None:
    result = measure_quickly("transport", "4 KB")
    ratios = {measure.what: result.ratios(measure) for measure in result.measures if measure.against}
    assert any(what.startswith("ours, bytes") for what in ratios) and all(ratio > 0 for (ratio,) in ratios.values())
    assert all(measure.unit == "bytes/s" for measure in result.measures)
