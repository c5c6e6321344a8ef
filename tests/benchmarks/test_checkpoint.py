"""Checkpoint: a real trainer, a real S3 server, and a proxy that holds its PUTs back."""

from __future__ import annotations

import pytest

from tests.benchmarks.conftest import MeasureQuickly


@pytest.mark.timeout(300)
def test_it_measures(measure_quickly: MeasureQuickly) -> None:
    result = measure_quickly("checkpoint")
    stalls = [measure for measure in result.measures if measure.unit == "ms"]
    rates = [measure for measure in result.measures if measure.unit == "1/s"]
    assert stalls and all(measure.median > 0 for measure in stalls)
    assert {len(result.ratios(measure)) for measure in rates if measure.against} == {1}
