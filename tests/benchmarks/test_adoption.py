"""Adoption: real worker processes note when they act with a published version."""

from __future__ import annotations

import pytest

from tests.benchmarks.conftest import MeasureQuickly


@pytest.mark.timeout(300)
def test_it_measures(measure_quickly: MeasureQuickly) -> None:
    result = measure_quickly("adoption", "64×64")
    assert {measure.unit for measure in result.measures} == {"ms"}
    found = {measure.what: measure.median for measure in result.measures}
    assert all(milliseconds > 0 for milliseconds in found.values())
    assert all(
        found[f"p50 with encoding, {who}"] >= found[f"p50, {who}"]
        for who in {what.partition(", ")[2] for what in found}
    )
