"""The benchmark `tuning`, with a real run that is looked at for a moment."""

from __future__ import annotations

import pytest

from benchmarks.suite.tuning import SETTINGS
from tests.benchmarks.conftest import MeasureQuickly


@pytest.mark.timeout(400)
def test_a_setting_is_a_real_run(measure_quickly: MeasureQuickly) -> None:
    result = measure_quickly("tuning", "slow: 1 × 8 × 64, async")
    (line,) = result.measures
    assert (line.what, line.against) == ("slow: 1 × 8 × 64, async", "") and line.samples[0] > 0
    assert result.settings[line.what]["environment"]["vectorization"] == "async"


def test_an_update_learns_from_the_same_number_of_transitions_whatever_the_fragments() -> None:
    for setting in SETTINGS:
        assert setting.envs * setting.steps * max(1, 2048 // (setting.envs * setting.steps)) == 2048
